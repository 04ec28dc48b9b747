"""An exported policy answers as the policy does, without Lehr: in NumPy, as a StableHLO program and in ONNX."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.acting.export.numpy_policy import NumpyPolicy
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.algorithms import ppo
from lehr.maths.normalise import initial_statistics
from lehr.networks import NetworkConfig, actor_critic
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete
from lehr.training.plan import make_plan

SIZE = 6
VECTOR = Box(-3, 3, (5,))
BOUNDED = Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32))
MIXED = Dict(
    {"gear": Discrete(3), "hidden": Box(-1, 1, (2,)), "place": Box(-1, 1, (2, 2)), "switch": MultiDiscrete((2, 3))}
)

KINDS = {
    "discrete": (VECTOR, Discrete(3), {}, False),
    "from 5": (Dict({"gear": Discrete(3, start=-4), "seen": VECTOR}), Discrete(3, start=5), {}, False),
    "squashed": (VECTOR, BOUNDED, {"distribution": "tanh_normal", "activation": "silu"}, True),
    "clipped": (VECTOR, BOUNDED, {"state_dependent_std": True, "activation": "gelu", "layer_norm": True}, True),
    "unbounded": (VECTOR, Box(-np.inf, np.inf, (2,)), {"shared": True, "activation": "elu", "hidden_sizes": ()}, False),
    "multi-discrete": (MIXED, MultiDiscrete((2, 4)), {"actor_obs": ("gear", "place", "switch")}, True),
    "masked": (Dict({"action_mask": Box(0, 1, (2, 4), np.int8), "seen": VECTOR}), MultiDiscrete((2, 4)), {}, True),
    "half precision": (Box(-3, 3, (5,), np.float16), BOUNDED, {}, True),
    "bools": (Dict({"action_mask": Box(0, 1, (3,), bool), "seen": Box(0, 1, (4,), bool)}), Discrete(3), {}, True),
    "lstm": (VECTOR, Discrete(3), {"torso": "lstm"}, False),
    "gru": (VECTOR, BOUNDED, {"torso": "gru", "critic_torso": "mlp"}, True),
    "mingru": (VECTOR, Discrete(3), {"torso": "mingru", "shared": True}, False),
    "image": (Dict({"image": Box(0, 255, (8, 9, 2), np.uint8), "speed": Box(-1, 1, (1,))}), Discrete(3), {}, True),
    "large image": (Box(0, 1, (36, 36, 1)), Discrete(3), {"torso": "cnn", "hidden_sizes": (8,)}, False),
}


def policy_of(kind):
    """A fresh policy, with weights large enough that its actions reach their bounds and its choices vary."""
    observation_space, action_space, settings, normalises = KINDS[kind]
    config, rng = NetworkConfig(**{"hidden_sizes": (16, 8), "recurrent_size": 8} | settings), np.random.default_rng(0)
    made = {}

    def initialise(key):
        made["network"], params = actor_critic(observation_space, action_space, config, key)
        return params

    def fill(x):
        return (rng.normal(size=x.shape) / np.sqrt(np.prod(x.shape[-4:-1]) or 1)).astype(np.float32)

    params = jax.tree.map(fill, jax.eval_shape(initialise, jax.random.key(0)))  # nothing is compiled
    statistics = ()
    if normalises:
        statistics = initial_statistics(jax.tree.map(lambda x: x[0], draw(observation_space, rng)))
        spread = jax.tree.map(
            lambda x: np.float32(0.01) + rng.uniform(size=x.shape).astype(np.float32), statistics.mean
        )
        statistics = replace(statistics, mean=jax.tree.map(fill, statistics.mean), variance=spread)
    program = PolicyProgram(ppo.Algorithm(ppo.Config(), made["network"]), observation_space, action_space)
    return Policy(program, PolicyParameters(params, statistics))


def draw(space, rng):
    """Random observations, `[SIZE, ...]`."""
    match space:
        case Dict():
            return {name: draw(inner, rng) for name, inner in space.spaces.items()}
        case Box() if space.dtype.kind == "b":
            return rng.integers(0, 2, (SIZE, *space.shape)).astype(bool)
        case Box() if space.dtype.kind in "iu":
            return rng.integers(space.low, space.high, (SIZE, *space.shape), space.dtype, endpoint=True)
        case Box():
            return rng.uniform(space.low, space.high, (SIZE, *space.shape)).astype(space.dtype)
        case Discrete():
            return rng.integers(space.start, space.start + space.n, size=SIZE, dtype=np.int32)
        case MultiDiscrete():
            return rng.integers(space.nvec, size=(SIZE, len(space.nvec)), dtype=np.int32)


@pytest.fixture(scope="module", params=KINDS)
def expected(request):
    """A policy, observations of three steps, and what it answers to each: its action and distribution."""
    policy = policy_of(request.param)
    program, learned = policy.program, policy.learned

    @jax.jit
    def step(carry, obs):
        seen, no = lehr.acting.agent.observed(learned.observation_statistics, obs), jnp.zeros(SIZE, bool)
        _, distribution = program.agent.network.act(learned.params, carry, seen, no)
        carry, action = program.act(learned, carry, obs, no, jax.random.key(0), jnp.bool(True))
        return carry, {"action": action, **vars(distribution)}

    carry, answers = policy.initial_carry(SIZE), []
    for seed in range(3):
        obs = draw(program.observation_space, np.random.default_rng(seed))
        carry, answer = step(carry, obs)
        names = {"action", "logits", "mean", "log_std"} & set(answer)
        answers.append((obs, {name: np.asarray(answer[name]) for name in names}, carry["actor"]))
    return policy, answers


def equal(found, answer):
    for name, value in answer.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_numpy(expected, tmp_path):
    policy, answers = expected
    exported = NumpyPolicy(lehr.export(policy, "numpy", tmp_path / "policy.npz"))
    carry = exported.initial_carry(SIZE)
    for obs, answer, memory in answers:
        found = exported.outputs(obs, carry)
        equal(found, answer)
        carry, action = exported.step(carry, obs)
        np.testing.assert_array_equal(action, found["action"])
        equal(dict(enumerate(carry)), dict(enumerate(jax.tree.leaves(memory))))
    if not policy.program.is_recurrent:
        single = jax.tree.map(lambda x: x[0], obs)
        given = policy(single)
        np.testing.assert_allclose(exported(single), given, rtol=1e-5, atol=1e-5)
        assert (np.shape(exported(single)), exported(single).dtype) == (np.shape(given), given.dtype)


def test_onnx(expected, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    policy, answers = expected
    session = runtime.InferenceSession(lehr.export(policy, "onnx", tmp_path / "policy.onnx"))
    names = [given.name for given in session.get_inputs()]
    outputs = [given.name for given in session.get_outputs()]
    carry = {name: np.zeros((SIZE, 8), np.float32) for name in names if not name.startswith("obs")}
    for obs, answer, memory in answers:
        given = {f"obs_{key}": value for key, value in obs.items()} if isinstance(obs, dict) else {"obs": obs}
        given = {name: value for name, value in given.items() if name in names} | carry
        found = dict(zip(outputs, session.run(None, given), strict=True))
        equal(found, answer)
        carry = {name: found[f"next_{name}"] for name in carry}
        equal(dict(enumerate(carry.values())), dict(enumerate(jax.tree.leaves(memory))))


@pytest.mark.parametrize("expected", ["discrete", "from 5", "bools", "clipped", "gru", "image"], indirect=True)
def test_stablehlo(expected, tmp_path):
    policy, answers = expected
    written = lehr.export(policy, "stablehlo", tmp_path / "policy.stablehlo").read_bytes()
    program = jax.export.deserialize(bytearray(written))
    carry = policy.initial_carry(SIZE)
    for obs, answer, _ in answers:
        rest = (carry, np.zeros(SIZE, bool)) if policy.program.is_recurrent else ()
        found = program.call(obs, *rest)
        equal(found, answer)
        carry = found.get("carry")


def test_stablehlo_takes_batches_of_any_size(tmp_path):
    policy = policy_of("discrete")
    written = lehr.export(policy, "stablehlo", tmp_path / "policy.stablehlo").read_bytes()
    program = jax.export.deserialize(bytearray(written))
    (shape,) = (aval.shape for aval in program.in_avals)
    numbers = np.random.default_rng(0).normal(size=(7, *shape[1:])).astype(np.float32)
    whole = program.call(numbers)["action"]
    for size in (1, 2, 7):
        np.testing.assert_array_equal(program.call(numbers[:size])["action"], whole[:size])
    np.testing.assert_array_equal(policy(numbers), whole)


# NumPy alone --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chooser(tmp_path_factory):
    """A policy with choices, and its files for NumPy."""
    policy = policy_of("discrete")
    return policy, lehr.export(policy, "numpy", tmp_path_factory.mktemp("exported") / "chooser.npz")


def test_the_module_beside_the_file_needs_neither_jax_nor_lehr(chooser):
    policy, path = chooser
    obs = draw(VECTOR, np.random.default_rng(9))
    code = (
        "import json, sys, numpy as np; from chooser import NumpyPolicy; "
        "print(json.dumps(NumpyPolicy('chooser.npz')(np.array(json.loads(sys.argv[1]))).tolist())); "
        "assert not {'jax', 'lehr'} & set(sys.modules)"
    )
    words = [sys.executable, "-c", code, json.dumps(obs.tolist())]
    answer = subprocess.run(words, cwd=path.parent, stdout=subprocess.PIPE, env={"PYTHONPATH": "."}, check=True)
    assert json.loads(answer.stdout) == policy(obs).tolist()


def test_choices_are_drawn_by_their_probabilities(chooser):
    exported, rng = NumpyPolicy(chooser[1]), np.random.default_rng(0)
    obs = np.repeat(draw(VECTOR, rng)[:1], 20_000, axis=0)
    logits = exported.outputs(obs[0])["logits"]
    probabilities = np.exp(logits) / np.exp(logits).sum()
    shares = np.bincount(exported(obs, rng), minlength=3) / len(obs)
    np.testing.assert_allclose(shares, probabilities, atol=4 * 0.5 / np.sqrt(len(obs)))


def test_numbers_are_drawn_with_their_mean_and_spread(tmp_path):
    exported = NumpyPolicy(lehr.export(policy_of("unbounded"), out=tmp_path / "policy.npz"))
    rng = np.random.default_rng(0)
    obs = np.repeat(draw(VECTOR, rng)[:1], 20_000, axis=0)
    found, drawn = exported.outputs(obs[0]), exported(obs, rng)
    np.testing.assert_allclose(
        drawn.mean(0), found["mean"], atol=4 * np.exp(found["log_std"]).max() / np.sqrt(len(obs))
    )
    np.testing.assert_allclose(drawn.std(0), np.exp(found["log_std"]), rtol=0.03)


def test_a_recurrent_policy_says_how_it_is_used(tmp_path):
    exported = NumpyPolicy(lehr.export(policy_of("mingru"), out=tmp_path / "policy.npz"))
    with pytest.raises(ValueError, match=r"is recurrent; use carry, action = policy.step\(carry, obs\)"):
        exported(np.zeros(5, np.float32))


# What is refused ----------------------------------------------------------------------------------------------------


def test_bad_input_is_one_sentence(chooser, tmp_path, monkeypatch):
    policy, path = chooser
    for arguments, sentence in {
        (policy, "onix"): "The format to export to is 'onix'; did you mean 'onnx'",
        (policy, "numpy", path): "chooser.npz' exists already, and is not overwritten; remove it",
        (policy, "onnx", path): "but the file of onnx ends in .onnx; name it 'chooser.onnx'",
        (policy, "numpy", tmp_path / "no" / "policy.npz"): "No such file or directory; give another out",
        ("runs/a", "numpy"): "policy is a str, not a policy; give result.policy",
    }.items():
        with pytest.raises(lehr.InputError, match=sentence):
            lehr.export(*arguments)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(lehr.InputError, match=r"Exporting to ONNX needs the package onnx.*pip install 'lehr\[onnx\]'"):
        lehr.export(policy, "onnx", tmp_path / "policy.onnx")
    assert not any(tmp_path.iterdir())


def test_an_integer_that_does_not_fit_is_not_wrapped_around(tmp_path):
    policy = policy_of("multi-discrete")
    exported = NumpyPolicy(lehr.export(policy, out=tmp_path / "policy.npz"))
    obs = jax.tree.map(
        lambda x: x.astype(np.int64) if x.dtype == np.int32 else x, draw(MIXED, np.random.default_rng(0))
    )
    np.testing.assert_array_equal(exported(obs), policy(obs))
    obs["gear"][2] = 2**32 + 1
    with pytest.raises(lehr.InputError, match=r"has the integer 4294967297, but this policy expects Discrete\(n=3\)"):
        policy(obs)
    with pytest.raises(ValueError, match=r"obs_gear has 4294967297, which does not fit into int32"):
        exported(obs)


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"activation": double}, "The activation double is not built in, and only tanh, relu,"),
        ({"precision": "bfloat16"}, "computes in bfloat16, and only float32 can be exported"),
    ],
)
def test_what_only_jax_can_run_is_refused(settings, sentence, monkeypatch, tmp_path):
    monkeypatch.setitem(KINDS, "own", (VECTOR, Discrete(3), settings, False))
    with pytest.raises(lehr.InputError, match=f"{sentence}.*export to stablehlo"):
        lehr.export(policy_of("own"), out=tmp_path / "policy.npz")


def test_an_algorithm_that_acts_in_its_own_way_is_refused(chooser, tmp_path):
    class Contrary(ppo.Algorithm):
        def act(self, params, carry, obs, reset, key, greedy=False):
            carry, action, kept = super().act(params, carry, obs, reset, key, greedy)
            return carry, (action + 1) % 3, kept

    policy = chooser[0]
    agent = Contrary(policy.program.agent.config, policy.program.agent.network)
    with pytest.raises(lehr.InputError, match="acts otherwise than its network alone"):
        lehr.export(Policy(replace(policy.program, agent=agent), policy.learned), out=tmp_path / "policy.npz")


@pytest.mark.slow
def test_a_world_model_is_exported_as_a_program_alone(tmp_path):
    plan = make_plan("dreamer", {"preset": "tiny", "total_steps": 1000})
    policy = plan.policy(plan.state)
    with pytest.raises(lehr.InputError, match=r"is not Lehr's actor-critic .* export to stablehlo"):
        lehr.export(policy, "onnx", tmp_path / "policy.onnx")
    written = lehr.export(policy, "stablehlo", tmp_path / "policy.stablehlo").read_bytes()
    program, no = jax.export.deserialize(bytearray(written)), np.zeros(3, bool)
    carry = memory = policy.initial_carry(3)
    for obs in np.random.default_rng(0).normal(size=(4, 3, 4)).astype(np.float32):
        found = program.call(obs, memory, no)
        (carry, action), memory = policy.step(carry, obs, no), found["carry"]
        assert found["action"].tolist() == action.tolist()
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), memory, carry)
