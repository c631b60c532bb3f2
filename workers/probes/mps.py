"""Whether a control daemon of NVIDIA's Multi-Process Service answers: it gives processes shares of cards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.probes.tools import Answer, VendorTool

TOOL = "nvidia-cuda-mps-control"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 - where NVIDIA's daemon listens unless told another place
DEFAULT_LOGS = Path("/var/log/nvidia-mps")
_TIMEOUT_SECONDS = 3.0
_ABSENT = "Cannot find MPS control daemon"


@dataclass(frozen=True, slots=True)
class MpsState:
    """Whether replicas can be clients of MPS, and what to do where they cannot."""

    ready: bool = False
    note: str = ""


class MpsProbe:
    """Asks the daemon behind a folder of pipes. Not for several threads at once."""

    def __init__(self, pipes: Path = DEFAULT_PIPES, logs: Path = DEFAULT_LOGS) -> None:
        self.pipes = pipes
        self.logs = logs
        self._tool = VendorTool(TOOL, timeout_seconds=_TIMEOUT_SECONDS)

    def look(self, slice_uuid: str = "") -> MpsState:
        """Ask now. The daemon of a MIG slice is one of its own, in a folder with the slice's name."""
        pipes = self.folder_of(slice_uuid)
        if not self._tool.present:
            return MpsState(note=f"{TOOL} is not on this host's PATH: it comes with the NVIDIA driver")
        complaint = self._complaint(pipes)
        return (
            MpsState(note=self._advice(pipes, slice_uuid, complaint)) if complaint else MpsState(ready=True)
        )

    def _complaint(self, pipes: Path) -> str:
        # Most nodes have no daemon, and no program need be run each minute to find that out.
        if not (pipes / "control").exists():
            return "nobody listens there"
        return read_complaint(
            self._tool.ask(say="get_server_list\n", env={"CUDA_MPS_PIPE_DIRECTORY": str(pipes)})
        )

    def look_at_any(self, slice_uuids: tuple[str, ...]) -> MpsState:
        """Whether the node's daemon answers, or that of one of these slices."""
        state = self.look()
        if not state.ready and self._tool.present:
            started = (uuid for uuid in slice_uuids if self.folder_of(uuid).is_dir())
            state = next((found for uuid in started if (found := self.look(uuid)).ready), state)
        return state

    def folder_of(self, slice_uuid: str) -> Path:
        """Where the pipes of the daemon for a card, or of one slice, are."""
        return self.pipes / slice_uuid.replace("/", "_") if slice_uuid else self.pipes

    def _advice(self, pipes: Path, slice_uuid: str, complaint: str) -> str:
        shows = f"CUDA_VISIBLE_DEVICES={slice_uuid} " if slice_uuid else ""
        return (
            f"no MPS control daemon answers at {pipes} ({complaint}): start one as the agent's user or as "
            f"root, with {shows}CUDA_MPS_PIPE_DIRECTORY={pipes} CUDA_MPS_LOG_DIRECTORY={self.logs} {TOOL} -d"
        )


def read_complaint(answer: Answer) -> str:
    """What is wrong with an answer to `get_server_list`; empty where it lists servers, or none yet."""
    said = f"{answer.text}\n{answer.problem}"
    if _ABSENT in said:
        return f"{_ABSENT} process"
    if answer.problem:
        return answer.problem
    odd = [line.strip() for line in answer.text.splitlines() if line.strip() and not line.strip().isdigit()]
    return odd[0][:120] if odd else ""
