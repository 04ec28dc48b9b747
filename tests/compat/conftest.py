"""What tests of several files share."""

import importlib
import warnings

import pytest


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of Ray without workers, for algorithms of RLlib that are in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others deprecate
        ray = pytest.importorskip("ray")
        pytest.importorskip("ray.rllib", exc_type=ImportError)
        trainable = importlib.import_module("ray.tune.trainable.trainable")
        ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False, logging_level="error")
    with pytest.MonkeyPatch.context() as patch:
        # Every algorithm makes a folder, by default in ~/ray_results.
        patch.setattr(trainable, "DEFAULT_STORAGE_PATH", str(tmp_path_factory.mktemp("ray_results")))
        yield
    ray.shutdown()
