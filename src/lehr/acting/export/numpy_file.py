"""Export a policy as a file `.npz` for NumPy, and the module that acts with it."""

import inspect
import io
import json
from typing import Any

import numpy as np

from lehr.acting.export import numpy_policy
from lehr.acting.export.policy_graph import noise, policy_graph
from lehr.acting.policy import Policy


def numpy_files(policy: Policy) -> dict[str, bytes]:
    """Return the contents of the file and of the module, by their suffixes."""
    graph = policy_graph(policy, samples=True)
    about: dict[str, Any] = {
        "format": "lehr policy",
        "version": 1,
        "inputs": graph.inputs,
        "carry": graph.carry,
        "noise": noise(policy.program.action_space),
        "operations": graph.operations,
        "outputs": graph.outputs,
    }
    archive = io.BytesIO()
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(archive, allow_pickle=False, description=text, **graph.constants)
    return {".npz": archive.getvalue(), ".py": inspect.getsource(numpy_policy).encode()}
