"""Fixtures of several test files."""

import importlib
import warnings

import pytest


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Ray cluster without workers, for RLlib algorithms in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in other packages
        ray = pytest.importorskip("ray")
        pytest.importorskip("ray.rllib", exc_type=ImportError)
        trainable = importlib.import_module("ray.tune.trainable.trainable")
        ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False, logging_level="error")
    with pytest.MonkeyPatch.context() as patch:
        # Every algorithm creates a folder, in ~/ray_results by default.
        patch.setattr(trainable, "DEFAULT_STORAGE_PATH", str(tmp_path_factory.mktemp("ray_results")))
        yield
    ray.shutdown()
