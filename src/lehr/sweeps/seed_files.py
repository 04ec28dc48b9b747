"""What a sweep of seeds alone has in its directory, besides what every sweep has.

curve.png             the mean return of the seeds over env steps, with its interval
seeds/0.jsonl         the metrics of seed 0, one row per line; and so on
"""

from functools import partial
from pathlib import Path

import numpy as np

from lehr.files import make_directory
from lehr.report.curves import band_figure
from lehr.report.loggers.jsonl import JsonLines
from lehr.report.plots import save_figure
from lehr.sweeps.directory import SweepDirectory
from lehr.sweeps.results import Results
from lehr.sweeps.statistics import CONFIDENCE, bootstrap, mean
from lehr.sweeps.wave_metrics import read_wave


def write_seeds(directory: SweepDirectory, results: Results) -> None:
    """Write the curve, and the metrics of each seed that is trained."""
    label = f"{CONFIDENCE:.0%} bootstrap interval of the mean"
    made = band_figure(results.env_steps, results.returns[:, 0], partial(bootstrap, mean), label)
    save_figure(made, directory.path / "curve.png")
    folder = directory.path / "seeds"
    make_directory(folder)
    for wave in directory.read_waves():
        if directory.is_finished(wave):
            table = read_wave(directory, wave)
            for place, member in enumerate(wave.members):
                _write_rows(folder / f"{member.seed}.jsonl", table, place)


def _write_rows(path: Path, table: dict[str, np.ndarray], place: int) -> None:
    """Write the metrics of one member, which has a place on the second axis of each table, up to its end."""
    path.unlink(missing_ok=True)
    rows = JsonLines(path)
    own = {name: column for name, column in table.items() if not name.startswith("evolution/")}
    for number in np.flatnonzero(~np.isnan(table["update/frozen"][:, place])):
        values = {name: column[number] if column.ndim == 1 else column[number, place] for name, column in own.items()}
        missing = [name for name, value in values.items() if name.startswith("evaluate/") and np.isnan(value)]
        rows.log({name: value.item() for name, value in values.items() if name not in missing})
    rows.close()
