"""A logger of your own: some metrics as a CSV file in the run's directory.

Run it with `python examples/own_logger.py`, or
`lehr train ppo --env CartPole-v1 --loggers examples.own_logger:Csv`.
"""

import csv

import lehr


class Csv:
    """A logger is made for the run's directory and its settings, and has `log`, `flush` and `close`."""

    columns = ("env_steps", "episode/return", "coef/entropy_coef", "coef/learning_rate")

    def __init__(self, directory, config):
        path = directory / "metrics.csv"
        begins = not path.exists()  # a resumed run goes on
        self.file = path.open("a", newline="")
        self.writer = csv.DictWriter(self.file, self.columns, extrasaction="ignore")
        if begins:
            self.file.write(f"# {config['algorithm']} on {config['env']}\n")
            self.writer.writeheader()

    def log(self, row):
        """Take the metrics of one update, by name."""
        self.writer.writerow(row)

    def flush(self):
        """Write what was logged; Lehr calls this every half second or so, and before each checkpoint."""
        self.file.flush()

    def close(self):
        """Called once, at the end of the run."""
        self.file.close()


if __name__ == "__main__":
    result = lehr.train("ppo", "CartPole-v1", loggers=[Csv], total_steps=50_000)
    print((result.run_dir / "metrics.csv").read_text()[-300:])
