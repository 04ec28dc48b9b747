"""A sweep from Python: train the schedules of sweep.yaml at once, say which is best, and take the winner out as a run.

Run it with `python examples/sweep.py`. It takes about a minute on two CPU cores.
`lehr sweep examples/sweep.yaml` does the same.
"""

from pathlib import Path

import lehr

result = lehr.sweep(Path(__file__).with_name("sweep.yaml"))
print(result.summary)

scores = result.results.scores  # [configurations, seeds]
print(f"{scores.shape[0]} configurations with {scores.shape[1]} seeds each; the best three:")
for configuration in result.ranking.order[:3]:
    print(f"  {result.ranking.estimate(configuration).value:6.1f}  {result.results.texts[configuration]}")

(run,) = lehr.pick(result, "best", out=result.directory / "best")
print(f"The winner is the run {run}; its report is {result.directory / 'report.html'}")
print(f"Its policy over 100 episodes: {lehr.load(run).final['evaluate/return']:.0f}")
