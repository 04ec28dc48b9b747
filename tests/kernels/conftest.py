"""What tests of kernels share."""

import jax
import jax.numpy as jnp
import pytest

from lehr.kernels.mlp_plan import pl, triton


@pytest.fixture
def lowers_for_cuda():
    """Skip a test that lowers kernels for a GPU, if this JAX does so only where there is one."""

    def doubled(x):
        def kernel(x_ref, y_ref):
            y_ref[:] = 2 * x_ref[:]

        params = triton.CompilerParams(num_warps=1)
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=params)(x)

    try:
        jax.jit(doubled).trace(jnp.zeros(16)).lower(lowering_platforms=("cuda",))
    except RuntimeError as error:
        pytest.skip(f"this JAX lowers for a GPU only where there is one: {error}")
