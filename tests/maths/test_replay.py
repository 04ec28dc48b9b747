"""The replay: every sequence that is drawn is one that happened, ends of episodes and the ring's seam included."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import types
from lehr.errors import InputError
from lehr.maths import replay as ring
from lehr.types import Rollout

HORIZON, STREAMS, LENGTH = 5, 3, 4
CAPACITY = 4 * HORIZON + 3


class Story:
    """Episodes of random lengths in every stream, with numbers that tell every observation apart."""

    def __init__(self, seed=0, masks=False):
        self.random, self.masks = np.random.default_rng(seed), masks
        self.count, self.reset = 0, np.ones(STREAMS, bool)
        self.current = self.fresh()
        self.lines = [[] for _ in range(STREAMS)]
        """By stream, what happened: observation, action, reward on arriving, first, last, terminal."""
        self.reward = np.zeros(STREAMS)

    def fresh(self):
        self.count += STREAMS
        return np.arange(self.count - STREAMS, self.count, dtype=np.float32)

    def rollout(self, kept=True):
        """The next rollout, told only if it is `kept`."""
        shape = HORIZON, STREAMS
        parts = {name: np.zeros(shape, np.float32) for name in ("obs", "final_obs", "action", "reward", "tag")}
        parts |= {name: np.zeros(shape, bool) for name in ("done", "terminated", "reset", "valid")}
        for t in range(HORIZON):
            valid = self.random.uniform(size=STREAMS) < (0.8 if self.masks else 2.0)
            final, action, reward = self.fresh(), self.random.normal(size=STREAMS), self.random.normal(size=STREAMS)
            done = self.random.uniform(size=STREAMS) < 0.3
            terminated = done & (self.random.uniform(size=STREAMS) < 0.5)
            for n in range(STREAMS):
                if valid[n] and kept:
                    first = bool(self.reset[n])
                    arrived = 0.0 if first else self.reward[n]
                    self.lines[n].append((self.current[n], action[n], arrived, first, False, False))
                    if done[n]:
                        self.lines[n].append((final[n], 0.0, reward[n], False, True, bool(terminated[n])))
            row = {"obs": self.current, "final_obs": final, "action": action, "reward": reward, "tag": self.current}
            row |= {"done": done, "terminated": terminated, "reset": self.reset, "valid": valid}
            for name, value in row.items():
                parts[name][t] = value
            self.reward, self.reset = reward, done | ~valid
            self.current = np.where(done, self.fresh(), final)
        tag = parts.pop("tag")
        valid = parts.pop("valid")
        given = {name: jnp.asarray(value) for name, value in parts.items()}
        nothing = {"log_prob": (), "value": (), "next_value": (), "carry": ()}
        return Rollout(
            **given, **nothing, valid=jnp.asarray(valid) if self.masks else (), extras={"tag": jnp.asarray(tag)}
        )


append = jax.jit(ring.append)
draw = jax.jit(partial(ring.draw, batch=64, length=LENGTH))


def begin(story):
    shapes = jax.eval_shape(lambda: story.rollout(kept=False))
    return ring.empty(shapes, CAPACITY)


def lines_of(entries, index):
    """A drawn sequence in the form of `Story.lines`."""
    names = "obs", "action", "reward", "first", "last", "terminal"
    columns = [np.asarray(getattr(entries, name))[:, index] for name in names]
    return [tuple(column[row] for column in columns) for row in range(LENGTH)]


def happened(found, line):
    """Whether a sequence is part of what happened in a stream."""
    windows = np.lib.stride_tricks.sliding_window_view(np.float32(line), LENGTH, axis=0)
    return bool((windows == np.float32(found).T).all((1, 2)).any())


@pytest.mark.parametrize("masks", [False, True], ids=["all", "masked"])
def test_every_sequence_is_one_that_happened_also_across_the_seam_and_over_ends(masks):
    story = Story(masks=masks)
    data, cursor = begin(Story(masks=masks))
    ends, seams = 0, 0
    for number in range(14):
        data, cursor = append(data, cursor, story.rollout())
        drawn = draw(data, cursor, jax.random.key(number))
        for index in range(drawn.stream.shape[1]):
            stream, place = int(drawn.stream[0, index]), np.asarray(drawn.place[:, index])
            found = lines_of(drawn.entries, index)
            assert happened(found, story.lines[stream])
            ends += any(line[4] for line in found[:-1])
            seams += bool((np.diff(place) < 0).any())
    assert ends > 50
    assert seams > 50
    usable = CAPACITY - ring.margin(HORIZON)
    assert (np.asarray(cursor.size) == usable).all()


def test_the_final_observation_is_an_entry_with_the_last_reward():
    story = Story(seed=1)
    data, cursor = begin(Story())
    rollout = story.rollout()
    data, cursor = append(data, cursor, rollout)
    done, stream = np.asarray(rollout.done), 0
    t = int(np.argmax(done[:, stream]))
    assert done[t, stream]
    entry = jax.tree.map(lambda x: np.asarray(x[stream, t + 1]), data.entries)
    assert entry.obs == rollout.final_obs[t, stream]
    assert entry.reward == rollout.reward[t, stream]
    assert entry.last
    assert entry.terminal == rollout.terminated[t, stream]
    following = jax.tree.map(lambda x: np.asarray(x[stream, t + 2]), data.entries)
    assert following.first
    assert following.reward == 0
    assert following.obs == rollout.obs[t + 1, stream]


def test_all_sequences_are_drawn_equally_often():
    story = Story()
    data, cursor = begin(Story())
    for _ in range(9):
        data, cursor = append(data, cursor, story.rollout())
    counts = {}
    for number in range(120):
        drawn = draw(data, cursor, jax.random.key(number))
        for pair in zip(np.asarray(drawn.stream[0]), np.asarray(drawn.place[0]), strict=True):
            counts[pair] = counts.get(pair, 0) + 1
    possible = int(ring.number_of_sequences(cursor, LENGTH).sum())
    assert len(counts) == possible
    expected = 120 * 64 / possible
    assert np.sum((np.array(list(counts.values())) - expected) ** 2 / expected) < 2 * possible  # chi-squared


def test_a_rejected_rollout_is_neither_drawn_nor_joined_to_what_follows():
    story = Story()
    data, cursor = begin(Story())
    for number in range(12):
        if number % 3 == 2:  # what the guard does: the data stays, the cursor does not
            poison = story.rollout(kept=False)._replace(reward=jnp.full((HORIZON, STREAMS), jnp.nan))
            data, _ = append(data, cursor, poison)
            story.reset[:] = True
        data, cursor = append(data, cursor, story.rollout())
        drawn = draw(data, cursor, jax.random.key(number))
        for index in range(drawn.stream.shape[1]):
            assert happened(lines_of(drawn.entries, index), story.lines[int(drawn.stream[0, index])])


def test_a_replay_larger_than_the_memory_is_refused(monkeypatch):
    data, _ = begin(Story())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(data.entries))
    monkeypatch.setattr(types, "memory_size", lambda: size)
    begin(Story())
    monkeypatch.setattr(types, "memory_size", lambda: size - 1)
    with pytest.raises(
        InputError, match=r"The replay needs 0 GiB of memory, but there are only .*; lower replay_size\."
    ):
        begin(Story())
