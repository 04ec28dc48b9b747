"""Scenes of MuJoCo models, for Brax and Playground: as frames by MuJoCo's renderer, and as a page with Brax's viewer.

Frames need OpenGL without a window, which not every machine has; the page needs nothing here, but its reader needs a
browser and a network, since Brax's viewer is loaded from its own address.
"""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lehr.plugins import require

WIDTH, HEIGHT = 480, 360
PAGE, PICTURES = (".html",), (".gif", ".mp4")

_BACKENDS = {"linux": ("egl", "osmesa"), "darwin": ("cgl",)}
_PROBE = """
import importlib, sys, mujoco
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(64, 64)
context.make_current()
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
"""
"""Asks whether an OpenGL works; in a process of its own, since a failure may end the process or spoil the next try."""

_SHAPES = {0: "Plane", 2: "Sphere", 3: "Capsule", 4: "Mesh", 5: "Cylinder", 6: "Box", 7: "Mesh"}
"""What Brax's viewer calls MuJoCo's types of geoms; an ellipsoid (4) is drawn as a mesh."""
_DEFAULT_COLOUR = np.array([0.5, 0.5, 0.5, 1.0], np.float32)
"""Of a geom that has none of its own, so that its material's counts."""
_OFFLINE = """
    <p id="offline" style="position: absolute; margin: 1em; font-family: sans-serif">
      Loading the viewer from the network. If this text stays, the browser cannot reach it: go online and reload.
    </p>
    <script type="module">import "viewer"; document.getElementById("offline").remove();</script>
"""
"""What a page shows until the viewer is there: without a network it would be empty."""
_ELLIPSOID, _MESH, _VISIBLE_GROUPS = 4, 7, 3


class Pose(NamedTuple):
    """Where the bodies of a model are: the joints, and the bodies that are moved from outside."""

    qpos: Any
    mocap_pos: Any = None
    mocap_quat: Any = None


@functools.cache
def opengl() -> str | None:
    """The module of MuJoCo whose OpenGL works here, as `MUJOCO_GL` or by trying; `None` if none does."""
    named = os.environ.get("MUJOCO_GL", "").lower()
    tried = (named,) if named in ("egl", "osmesa", "glfw", "cgl") else _BACKENDS.get(sys.platform, ("glfw",))
    if named in ("disable", "disabled", "off", "false", "0"):
        return None
    for name in tried:
        variables = {key: value for key, value in os.environ.items() if key != "PYOPENGL_PLATFORM"}
        command = [sys.executable, "-c", _PROBE, name]
        try:
            found = subprocess.run(command, env=variables | {"MUJOCO_GL": name}, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            continue
        if found.returncode == 0:
            return name
    return None


@dataclass(frozen=True, eq=False)
class Scene:
    """A MuJoCo model to look at.

    Args:
        model: an `MjModel`.
        seconds: the time between two poses.
    """

    model: Any
    seconds: float

    @property
    def formats(self) -> tuple[str, ...]:
        """Suffixes of the files that it can be saved to."""
        return PAGE if opengl() is None else PICTURES + PAGE

    def frames(self, poses: Iterable[Pose]) -> Iterator[np.ndarray]:
        """Yield the picture of each pose, uint8 `[HEIGHT, WIDTH, 3]`."""
        mujoco, model = require("mujoco", extra="brax"), self.model
        size = model.vis.global_
        size.offwidth, size.offheight = max(size.offwidth, WIDTH), max(size.offheight, HEIGHT)
        context = importlib.import_module(f"mujoco.{opengl()}").GLContext(WIDTH, HEIGHT)
        try:
            context.make_current()
            scene = mujoco.MjvScene(model, maxgeom=10_000)
            drawing = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, drawing)
            options, camera = mujoco.MjvOption(), self._camera()
            window, everything = mujoco.MjrRect(0, 0, WIDTH, HEIGHT), mujoco.mjtCatBit.mjCAT_ALL
            for data in self._posed(poses):
                pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
                mujoco.mjv_updateScene(model, data, options, None, camera, everything, scene)
                mujoco.mjr_render(window, scene, drawing)
                mujoco.mjr_readPixels(pixels, None, window, drawing)
                yield pixels[::-1].copy()
            drawing.free()
        finally:
            context.free()

    def page(self, poses: Iterable[Pose]) -> str:
        """The HTML of a page that plays the poses."""
        parts: dict[str, list[dict[str, Any]]] = {}
        for geom in range(self.model.ngeom):
            if self.model.geom_group[geom] < _VISIBLE_GROUPS and (drawn := self._geom(geom)) is not None:
                parts.setdefault(self._body_name(geom), []).append(drawn)
        places = [{"pos": _list(data.xpos[1:]), "rot": _list(data.xquat[1:])} for data in self._posed(poses)]
        system = {"opt": {"timestep": self.seconds}, "geoms": parts, "states": {"x": places}}
        viewer = require("brax.io.html", extra="brax", what="A page")
        page = viewer.render_from_json(json.dumps(system), height="", colab=False, base_url=None)
        return page.replace("<body>", f"<body>\n{_OFFLINE}", 1)

    def _posed(self, poses: Iterable[Pose]) -> Iterator[Any]:
        """Yield MuJoCo's data for each pose; it is the same object, with new contents."""
        mujoco = require("mujoco", extra="brax")
        data = mujoco.MjData(self.model)
        for pose in poses:
            data.qpos[:] = pose.qpos
            if self.model.nmocap and pose.mocap_pos is not None:
                data.mocap_pos[:], data.mocap_quat[:] = pose.mocap_pos, pose.mocap_quat
            mujoco.mj_kinematics(self.model, data)
            mujoco.mj_comPos(self.model, data)  # cameras follow it
            mujoco.mj_camlight(self.model, data)
            mujoco.mj_tendon(self.model, data)
            yield data

    def _camera(self) -> Any:
        """The model's camera that follows the agent, or its first, or one that sees all of it."""
        mujoco = require("mujoco", extra="brax")
        camera = mujoco.MjvCamera()
        if self.model.ncam == 0:
            mujoco.mjv_defaultFreeCamera(self.model, camera)
            return camera
        following = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, max(following, 0)
        return camera

    def _body_name(self, geom: int) -> str:
        """A name that is unique and that the viewer accepts."""
        body = int(self.model.geom_bodyid[geom])
        return "world" if body == 0 else f"{re.sub(r'[^0-9A-Za-z_]', '_', self.model.body(body).name)}_{body}"

    def _geom(self, index: int) -> dict[str, Any] | None:
        """A geom as Brax's viewer takes it; `None` for those that it does not know."""
        model, kind = self.model, int(self.model.geom_type[index])
        colour = model.geom_rgba[index]
        if kind not in _SHAPES or colour[3] == 0:
            return None
        if model.geom_matid[index] >= 0 and np.array_equal(colour, _DEFAULT_COLOUR):
            colour = model.mat_rgba[model.geom_matid[index]]
        found = {
            "name": _SHAPES[kind],
            "link_idx": int(model.geom_bodyid[index]) - 1,
            "pos": _list(model.geom_pos[index]),
            "rot": _list(model.geom_quat[index]),
            "rgba": _list(colour),
            "size": _list(model.geom_size[index]),
        }
        if kind == _MESH:
            mesh = model.mesh(int(model.geom_dataid[index]))
            corners, faces = int(mesh.vertadr[0]), int(mesh.faceadr[0])
            found["vert"] = _list(model.mesh_vert[corners : corners + int(mesh.vertnum[0])])
            found["face"] = model.mesh_face[faces : faces + int(mesh.facenum[0])].tolist()
        elif kind == _ELLIPSOID:
            found["vert"], found["face"] = _ellipsoid(model.geom_size[index])
        return found


def _list(array: Any) -> list[Any]:
    """Numbers for JSON, with as many digits as can be seen."""
    return np.round(np.asarray(array, float), 5).tolist()


def _ellipsoid(radii: np.ndarray, rings: int = 8, around: int = 16) -> tuple[list[Any], list[Any]]:
    """Corners and triangles of an ellipsoid."""
    polar, angle = np.meshgrid(np.linspace(0, np.pi, rings + 1), np.linspace(0, 2 * np.pi, around + 1), indexing="ij")
    unit = np.stack([np.sin(polar) * np.cos(angle), np.sin(polar) * np.sin(angle), np.cos(polar)], -1)
    corner = np.arange(unit[..., 0].size).reshape(polar.shape)
    a, b, c, d = (part.ravel() for part in (corner[:-1, :-1], corner[1:, :-1], corner[1:, 1:], corner[:-1, 1:]))
    faces = np.concatenate([np.stack([a, b, c], -1), np.stack([a, c, d], -1)])
    return _list((unit * radii).reshape(-1, 3)), faces.tolist()
