"""What the processes of a run on several hosts do, except the first: hand the same program to their devices."""

import logging
from typing import Any

from lehr.training import signals
from lehr.training.directory import RunDirectory
from lehr.training.loop import restore
from lehr.training.parts import copies, send_parts
from lehr.training.plan import Plan
from lehr.training.record import RunFailed
from lehr.training.runners import make_runner


def follow(plan: Plan, directory: RunDirectory, resumes: bool) -> Any:
    """Do what process 0 says until the end of the run, and return the last state."""
    hosts, state = plan.sharding.hosts, plan.state
    warn = logging.getLogger("lehr").warning
    if resumes:
        state, _ = restore(directory, plan, report=warn)
    runner = make_runner(plan, warn)
    with signals.handled(hosts.ask_to_stop):
        while (order := hosts.next_order())["do"] != "end":
            match order["do"]:
                case "begin":
                    if (here := int(state.updates)) != order["updates"]:
                        raise RunFailed(
                            f"Process {hosts.index} found the checkpoint of update {here} in '{directory.path}', but "
                            f"process 0 that of update {order['updates']}; resume once all hosts see the same files."
                        )
                    runner.compile(state)
                    state = runner.begin(state)
                case "advance":
                    state, _ = runner.advance(state, order["updates"])
                case "send":
                    send_parts(state.saved, order["paths"], hosts)
                case "compare":
                    hosts.answer(copies=copies(state))
    return state
