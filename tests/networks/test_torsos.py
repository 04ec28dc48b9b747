"""MLP and CNN: initialisation, dtypes and shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lehr.errors import InputError
from lehr.networks import CNN, MLP
from lehr.networks.torsos import convolve


def rngs():
    return nnx.Rngs(0)


def assert_orthogonal(kernel, gain):
    """The shorter side of a matrix `[in, out]` is orthonormal up to the gain."""
    kernel = np.asarray(kernel).reshape(-1, kernel.shape[-1])
    kernel = kernel if kernel.shape[0] < kernel.shape[1] else kernel.T
    np.testing.assert_allclose(kernel @ kernel.T, gain**2 * np.eye(len(kernel)), atol=1e-5)


def test_mlp_matches_the_formula():
    mlp = MLP(3, (4, 2), activation="tanh", rngs=rngs())
    mlp.layers[0].bias[...] = jnp.arange(4.0)
    x = np.array([[0.5, -1.0, 2.0]], np.float32)
    hidden = np.tanh(x @ np.asarray(mlp.layers[0].kernel[...]) + np.arange(4))
    np.testing.assert_allclose(mlp(x), np.tanh(hidden @ np.asarray(mlp.layers[1].kernel[...])), rtol=1e-5)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("tanh", -0.76159), ("relu", 0.0), ("gelu", -0.15881), ("silu", -0.26894), ("elu", -0.63212)],
)
def test_activations_have_their_value_at_minus_one(activation, expected):
    mlp = MLP(1, (1,), activation=activation, rngs=rngs())
    mlp.layers[0].kernel[...] = jnp.ones((1, 1))
    np.testing.assert_allclose(mlp(-jnp.ones(1)), expected, atol=1e-4)


def test_layer_norm_comes_before_the_activation():
    mlp = MLP(3, (16,), activation="relu", layer_norm=True, rngs=rngs())
    before = np.asarray(mlp.layers[0](jnp.array([1.0, 2.0, 3.0])))
    normalised = (before - before.mean()) / before.std()
    np.testing.assert_allclose(mlp(jnp.array([1.0, 2.0, 3.0])), np.maximum(normalised, 0), atol=1e-4)


def test_without_hidden_sizes_an_mlp_is_the_identity():
    mlp = MLP(3, (), rngs=rngs())
    assert mlp.out_features == 3
    assert mlp(jnp.arange(3.0)).tolist() == [0, 1, 2]


def test_weights_start_orthogonal():
    mlp = MLP(3, (8, 8), rngs=rngs())
    cnn = CNN((10, 10, 4), (32,), rngs=rngs())
    for layer in (*mlp.layers, *cnn.convolutions, *cnn.dense.layers):
        assert_orthogonal(layer.kernel[...], 2**0.5)
        assert not layer.bias[...].any()


@pytest.mark.parametrize(("shape", "flat"), [((10, 10, 4), 8 * 8 * 16), ((84, 84, 4), 7 * 7 * 64)])
def test_cnn_suits_small_and_large_images(shape, flat):
    def features_and_kernel(image):
        cnn = CNN(shape, (8,), rngs=rngs())
        return cnn(image), cnn.dense.layers[0].kernel[...]

    features, kernel = jax.eval_shape(features_and_kernel, jax.ShapeDtypeStruct((2, 3, *shape), jnp.uint8))
    assert features.shape == (2, 3, 8)
    assert kernel.shape == (flat, 8)


def test_bytes_are_scaled_and_floats_are_not():
    cnn = CNN((10, 10, 1), (8,), rngs=rngs())
    image = jax.random.randint(jax.random.key(0), (10, 10, 1), 0, 256)
    np.testing.assert_allclose(cnn(image.astype(jnp.uint8)), cnn(image / 255), rtol=1e-5, atol=1e-6)


def test_cnn_joins_the_vector_after_the_convolutions():
    cnn = CNN((10, 10, 1), (), vector_size=2, rngs=rngs())
    vector = jnp.array([[3.0, 4.0]])
    features = cnn(jnp.ones((1, 10, 10, 1)), vector)
    assert features.shape == (1, cnn.out_features) == (1, 8 * 8 * 16 + 2)
    np.testing.assert_array_equal(features[:, -2:], vector)


def test_an_image_below_its_convolutions_is_refused():
    with pytest.raises(InputError, match="2 × 2 is too small"):
        CNN((2, 2, 1), (8,), rngs=rngs())


def test_bfloat16_computes_in_bfloat16_on_float32_parameters():
    mlp = MLP(3, (64,), dtype=jnp.bfloat16, rngs=rngs())
    assert mlp.layers[0].kernel.dtype == jnp.float32
    assert mlp(jnp.ones(3)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((10, 10, 4), "float32"),
        pytest.param((40, 44, 3), "float32", marks=pytest.mark.slow),
        ((10, 12, 2), "bfloat16"),
    ],
)
def test_patches_give_what_the_convolution_gives(shape, dtype):
    """Outputs and gradients of all convolutions of a CNN, for images of both sizes."""
    cnn = CNN(shape, (), dtype=jnp.dtype(dtype), rngs=rngs())
    x = jax.random.normal(jax.random.key(1), (2, *shape)).astype(dtype)
    for convolution in cnn.convolutions:
        graphdef, params = nnx.split(convolution)
        params = jax.tree.map(lambda p: p + 0.1, params)  # a bias that is not 0

        def both(function, params=params, graphdef=graphdef, x=x):
            def loss(params):
                out = function(nnx.merge(graphdef, params), x)
                return jnp.sum(jnp.square(out.astype(jnp.float32))), out

            return jax.value_and_grad(loss, has_aux=True)(params)

        (_, out), gradients = both(convolve)
        (_, expected), wanted = both(lambda convolution, x: convolution(x))
        tolerance = 1e-4 if dtype == "float32" else 0.05
        for found, right in zip(jax.tree.leaves((out, gradients)), jax.tree.leaves((expected, wanted)), strict=True):
            found, right = np.asarray(found, np.float32), np.asarray(right, np.float32)
            np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance * np.abs(right).max())
        x = expected
