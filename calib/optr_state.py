"""Where an interrupted run of OptR goes on: a directory of Orbax checkpoints and the run's key.

DIR/run.json        what the run is: hashes of its rows and base, its settings
DIR/NAME/STEP/      Orbax: the newest state of one side of one group of layers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from orbax.checkpoint import v1 as ocp  # type: ignore[import-untyped]

RUN = "run.json"
State = TypeVar("State")


class Store:
    """The newest state of every named part of a run; without a directory it keeps nothing.

    Args:
        directory: made if it does not exist; one of another run is refused.
        run: what makes this run itself, as JSON values. A state is only good for the same rows,
            base and settings: then going on gives what no interruption would have given.

    Raises:
        ValueError: the directory holds something else, or another run; every difference is named.
    """

    def __init__(self, directory: Path | None, run: Mapping[str, Any]):
        self._directory = None if directory is None else Path(directory).absolute()
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = self._directory / RUN
            if not file.exists():
                if any(self._directory.iterdir()):
                    raise ValueError(f"resume={directory}: is not empty and holds no run of OptR")
                file.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
            known = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"resume={directory}: cannot be used ({error})") from None
        if known != run:
            names = sorted({*known, *run} if isinstance(known, dict) else run)
            differences = ", ".join(
                f"{name} is {known.get(name)!r} there and {run.get(name)!r} here"
                for name in names
                if known.get(name) != run.get(name)
            )
            raise ValueError(
                f"resume={directory}: holds another run ({differences}); use an empty directory"
            )

    def latest(self, name: str, fresh: State) -> tuple[int, State]:
        """(steps done, state) of part ``name``; (0, fresh) if nothing was saved."""
        if self._directory is None:
            return 0, fresh
        with self._checkpointer(name) as checkpointer:
            newest = checkpointer.latest
            if newest is None:
                return 0, fresh
            return newest.step, checkpointer.load(newest.step, fresh)

    def save(self, name: str, step: int, state: Any) -> None:
        """Keep ``state`` as the newest of part ``name``: complete or not at all."""
        if self._directory is not None:
            with self._checkpointer(name) as checkpointer:
                checkpointer.save(step, state)

    def _checkpointer(self, name: str) -> ocp.training.Checkpointer:
        assert self._directory is not None
        return ocp.training.Checkpointer(
            self._directory / name,
            preservation_policy=ocp.training.preservation_policies.LatestN(1),
            cleanup_tmp_directories=True,
        )
