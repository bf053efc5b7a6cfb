"""How much memory a device has, how much of it is to be had, and how much this process uses. Knows no model.

On the host, limits of the process's control groups (containers) count as well as the machine's RAM.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quantpipe.errors import DataError, RecipeError

if TYPE_CHECKING:
    import torch

# A version 1 control group without a limit reports about 2^63; no machine has that much.
_NO_LIMIT_BYTES = 1 << 60


class DeviceMemory(Protocol):
    """Bytes of one device."""

    def total_bytes(self) -> int:
        """The most this process could ever use."""
        ...

    def available_bytes(self) -> int:
        """What this process could use beyond what it does now."""
        ...

    def used_bytes(self) -> int:
        """What this process uses now."""
        ...

    def peak_bytes(self) -> int:
        """The most this process used since ``reset_peak``."""
        ...

    def reset_peak(self) -> None: ...


def memory_of(device: "torch.device") -> DeviceMemory:
    """The memory that tensors on ``device`` take. RecipeError where it cannot be measured here."""
    if device.type == "cuda":
        return CudaMemory(device)
    if device.type == "cpu":
        return HostMemory()
    raise RecipeError(
        f"engine.memory_utilization: memory of device {device} cannot be measured; give engine.kv_cache_memory in bytes"
    )


class HostMemory:
    """RAM, as Linux tells it under ``root``. DataError where it does not."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def total_bytes(self) -> int:
        return min([self._kib("proc/meminfo", "MemTotal"), *(limit for limit, _ in self._groups())])

    def available_bytes(self) -> int:
        """Cached file pages count as available: they are given up when memory runs short."""
        rooms = [limit - used for limit, used in self._groups()]
        return max(0, min([self._kib("proc/meminfo", "MemAvailable"), *rooms]))

    def used_bytes(self) -> int:
        return self._kib("proc/self/status", "VmRSS")

    def peak_bytes(self) -> int:
        return self._kib("proc/self/status", "VmHWM")

    def reset_peak(self) -> None:
        path = self._root / "proc/self/clear_refs"
        try:
            path.write_text("5", encoding="ascii")  # 5 resets VmHWM to VmRSS
        except OSError as error:
            raise _unmeasurable(path, error) from error

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Limit and use of each control group that limits this process: its own and those above it."""
        path = self._root / "proc/self/cgroup"
        if not path.is_file():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "":
                yield from self._limits(self._root / "sys/fs/cgroup", name, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                mount = self._root / "sys/fs/cgroup/memory"
                yield from self._limits(mount, name, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")

    def _limits(self, mount: Path, name: str, limit: str, usage: str, prefix: str) -> Iterator[tuple[int, int]]:
        # Inside a container the name may be one that only the host can see: then the mount itself is the group.
        own = mount / name.strip("/")
        for folder in [own, *own.parents]:
            if not folder.is_relative_to(mount):
                return
            text = _read(folder / limit)
            if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
                reclaimable = _field(_read(folder / "memory.stat"), f"{prefix}inactive_file")
                yield int(text), int(_read(folder / usage) or 0) - reclaimable

    def _kib(self, name: str, field: str) -> int:
        path = self._root / name
        found = _field(_read(path).replace(":", " "), field)
        if found == 0:
            raise _unmeasurable(path, f"no {field}")
        return found << 10


class CudaMemory:
    """Memory of one GPU, used by tensors of this process."""

    def __init__(self, device: "torch.device") -> None:
        import torch  # the rest of this file does without, for the planner

        self._device, self._cuda = device, torch.cuda

    def total_bytes(self) -> int:
        return int(self._cuda.mem_get_info(self._device)[1])

    def available_bytes(self) -> int:
        unused = self._cuda.memory_reserved(self._device) - self._cuda.memory_allocated(self._device)
        return int(self._cuda.mem_get_info(self._device)[0]) + unused

    def used_bytes(self) -> int:
        return int(self._cuda.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        return int(self._cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._device)


def _read(path: Path) -> str:
    """The text of a file of the kernel's, "" where there is none that may be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _field(text: str, name: str) -> int:
    """The number after ``name`` at the beginning of a line; 0 where there is none."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return 0


def _unmeasurable(path: Path, reason: object) -> DataError:
    return DataError(f"{path}: memory cannot be measured here ({reason}); give engine.kv_cache_memory in bytes instead")
