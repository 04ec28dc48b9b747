"""Which files show an environment, and what is in them."""

import json
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.envs import Environment, FrameStack, TimeLimit, make
from lehr.envs.builtin.classic import CartPole
from lehr.envs.suites import mujoco_scene
from lehr.envs.suites.mujoco_scene import Pose, Scene
from lehr.errors import InputError
from lehr.report import film, render
from lehr.spaces import Box, Dict
from lehr.types import Timestep

XML = """
<mujoco>
  <asset><mesh name="wedge" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset>
  <worldbody>
    <geom type="plane" size="2 2 1"/>
    <body name="slider/a" pos="0 0 1">
      <joint type="slide" axis="1 0 0"/>
      <geom type="box" size="0.1 0.2 0.3" rgba="1 0 0 1"/>
      <geom type="ellipsoid" size="0.1 0.2 0.3"/>
      <geom type="mesh" mesh="wedge"/>
      <geom type="sphere" size="0.1" group="3"/>
      <body name="hinge" pos="0 0 -0.5"><joint axis="0 0 1"/><geom type="capsule" size="0.1 0.3"/></body>
    </body>
  </worldbody>
</mujoco>
"""


@dataclass(frozen=True)
class Sliding(Environment):
    """A made-up task whose state is the position of its two joints."""

    scene: Scene
    observation_space = Box(-1, 1, (2,))
    action_space = Box(-1, 1, (1,))

    def reset(self, key):
        return jnp.zeros(2), jnp.zeros(2)

    def step(self, key, state, action):
        return state, Timestep(state, jnp.float32(0), jnp.bool(False), jnp.bool(False), {})

    def pose(self, state):
        return Pose(state)


@pytest.fixture(scope="module")
def sliding():
    mujoco = pytest.importorskip("mujoco")
    return TimeLimit(Sliding(Scene(mujoco.MjModel.from_xml_string(XML), seconds=0.02)), 10)


def states(env, *positions):
    state, _ = env.reset(jax.random.key(0))
    return [state._replace(env_state=np.array(position)) for position in positions]


def test_a_page_has_the_bodies_where_the_joints_put_them(sliding, tmp_path, monkeypatch):
    page = SimpleNamespace(render_from_json=lambda system, **_: system)  # Brax's own is slow to import
    import_package = mujoco_scene.require
    monkeypatch.setattr(mujoco_scene, "require", lambda name, **_: page if "html" in name else import_package(name, ""))
    film.save(sliding, states(sliding, [0.0, 0.0], [0.7, np.pi / 2]), [], tmp_path / "film.html")
    system = json.loads((tmp_path / "film.html").read_text())
    assert system["opt"]["timestep"] == 0.02
    assert list(system["geoms"]) == ["world", "slider_a_1", "hinge_2"]
    box, ellipsoid, mesh = system["geoms"]["slider_a_1"]  # the geom of group 3 is hidden, as in MuJoCo's viewer
    assert (box["name"], box["link_idx"], box["size"], box["rgba"]) == ("Box", 0, [0.1, 0.2, 0.3], [1, 0, 0, 1])
    np.testing.assert_allclose(np.max(ellipsoid["vert"], axis=0), [0.1, 0.2, 0.3], atol=1e-4)
    assert (len(mesh["vert"]), len(mesh["face"])) == (4, 4)
    before, after = system["states"]["x"]
    assert before["pos"] == [[0, 0, 1], [0, 0, 0.5]]
    assert after["pos"] == [[0.7, 0, 1], [0.7, 0, 0.5]]
    np.testing.assert_allclose(after["rot"][1], [np.sqrt(0.5), 0, 0, np.sqrt(0.5)], atol=1e-4)


@pytest.mark.slow
def test_mujoco_draws_the_bodies_where_opengl_works(sliding):
    if mujoco_scene.opengl() is None:
        pytest.skip("MuJoCo finds no OpenGL on this machine")
    left, right = sliding.env.scene.frames([Pose([-0.5, 0.0]), Pose([0.5, 0.0])])
    red = [np.nonzero(picture[..., 0] > 2 * picture[..., 1].astype(int) + 20)[1].mean() for picture in (left, right)]
    assert red[0] + 20 < red[1]


def test_what_cannot_be_shown_is_one_sentence(sliding, tmp_path, monkeypatch):
    monkeypatch.setattr(mujoco_scene, "opengl", lambda: None)
    assert film.formats(sliding) == (".html",)
    with pytest.raises(InputError, match=r"sliding cannot be drawn here, because MuJoCo finds no OpenGL .*\.html\.$"):
        film.check_environment(sliding, "sliding", ".gif")
    chain = make("DeepChain-v0")
    assert not film.can_show(chain)
    with pytest.raises(InputError, match="DeepChain-v0 cannot be shown, because it has no renderer"):
        film.check_environment(chain, "DeepChain-v0")
    with pytest.raises(InputError, match="CartPole-v1 cannot be shown as a page"):
        film.check_environment(make("CartPole-v1"), "CartPole-v1", ".html")
    for name, message in (("film.avi", "must end in .gif, .mp4 or .html"), ("none/film.gif", "there is no folder")):
        with pytest.raises(InputError, match=message):
            film.check_file(tmp_path / name)


def test_an_environment_whose_class_does_not_draw_says_so_once():
    pytest.importorskip("gymnasium")
    with pytest.raises(InputError, match=r"^\S+:Walk cannot be drawn: create it with render_mode='rgb_array', or let"):
        film.check_environment(make("tests.envs.gym_tasks:Walk"), "Walk")


def test_an_environment_on_the_host_is_tried(monkeypatch):
    pytest.importorskip("gymnasium")
    env = make("gym:CartPole-v1")
    assert film.can_show(env)
    monkeypatch.setattr("lehr.envs.host.gym.Singles.render", lambda self: 1 / 0)
    with pytest.raises(InputError, match=r"gym:CartPole-v1 cannot be shown: its render failed \(division by zero\)"):
        film.check_environment(env, "gym:CartPole-v1")


@dataclass(frozen=True)
class Pixels(CartPole):
    observation_space = Dict({"mask": Box(0, 1, (4,)), "image": Box(0, 255, (6, 9, 3), np.uint8)})


def test_images_that_are_observed_are_shown(tmp_path):
    assert render.observed_image(Pixels.observation_space) == ("image",)
    assert render.observed_image(FrameStack(CartPole(), 8).observation_space) is None
    image = np.zeros((6, 9, 3), np.uint8)
    image[2, 3] = (255, 0, 51)
    (picture,) = render.observed_frames(Pixels.observation_space, [{"mask": np.zeros(4), "image": image}])
    assert picture.shape == (120, 180, 3)
    assert (picture[40:60, 60:80] == [255, 0, 51]).all()
    assert picture.sum() == 400 * (255 + 51)


def test_a_video_has_all_frames(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    shades = [np.full((21, 33, 3), shade, np.uint8) for shade in (0, 128, 255)]
    (tmp_path / "film.mp4").symlink_to(tmp_path / "elsewhere.mp4")
    film.save_frames(shades, tmp_path / "film.mp4", fps=10)
    assert not (tmp_path / "elsewhere.mp4").exists()  # a link is replaced, not followed
    command = [ffmpeg.get_ffmpeg_exe(), "-i", tmp_path / "film.mp4", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    decoded = subprocess.run(command, capture_output=True, check=True)
    assert b"34x22" in decoded.stderr
    assert b"10 fps" in decoded.stderr
    found = np.frombuffer(decoded.stdout, np.uint8).reshape(-1, 22, 34, 3)[:, :20, :32]  # even sizes, filled with black
    np.testing.assert_allclose(found.mean(axis=(1, 2, 3)), [0, 128, 255], atol=3)
