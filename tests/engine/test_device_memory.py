"""Limits of machine and control groups, from the files that Linux tells them in; the process's own use, measured."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quantpipe.engine.device_memory import CudaMemory, HostMemory, memory_of
from quantpipe.errors import QuantpipeError

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> HostMemory:
    """A machine of 64 GiB, 40 of them available, with ``files`` besides."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return HostMemory(root)


def test_machine_without_control_groups_is_its_ram(tmp_path: Path) -> None:
    memory = machine(tmp_path, {})
    assert (memory.total_bytes(), memory.available_bytes()) == (64 * GIB, 40 * GIB)


def test_tightest_control_group_above_the_process_counts(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            "sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{15 * GIB}\n",
        },
    )
    # 5 GiB are in use and 2 of them file pages; of the outer group 1 GiB is left.
    assert (memory.total_bytes(), memory.available_bytes()) == (8 * GIB, 1 * GIB)


def test_version_one_group_named_as_the_host_sees_it_is_found_at_the_mount(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/docker/1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {1 * GIB}\n",
        },
    )
    assert (memory.total_bytes(), memory.available_bytes()) == (4 * GIB, 2 * GIB)


def test_version_one_group_without_a_limit_is_none(tmp_path: Path) -> None:
    unlimited = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    assert machine(tmp_path, unlimited).total_bytes() == 64 * GIB


def test_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    full = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "1200\n",
    }
    assert machine(tmp_path, full).available_bytes() == 0


def test_machine_that_does_not_tell_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(QuantpipeError, match=r"proc/meminfo: .* give engine.kv_cache_memory"):
        HostMemory(tmp_path).total_bytes()
    with pytest.raises(QuantpipeError, match=r"proc/self/clear_refs: .* give engine.kv_cache_memory"):
        HostMemory(tmp_path).reset_peak()
    with pytest.raises(QuantpipeError, match=r"device meta .* give engine.kv_cache_memory"):
        memory_of(torch.device("meta"))


def test_peak_of_this_process_is_seen_and_reset() -> None:
    memory = memory_of(torch.device("cpu"))
    memory.reset_peak()
    before = memory.used_bytes()
    block = np.ones(200 << 17)  # 200 MiB
    assert memory.used_bytes() - before > 150 << 20
    del block
    assert memory.peak_bytes() - before > 150 << 20
    memory.reset_peak()
    assert memory.peak_bytes() - before < 150 << 20
    assert 0 < memory.available_bytes() <= memory.total_bytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_on_a_gpu_are_counted() -> None:
    device = torch.device("cuda:0")
    memory = memory_of(device)
    assert isinstance(memory, CudaMemory)
    memory.reset_peak()
    before = memory.used_bytes()
    block = torch.ones(100 << 18, device=device)  # 100 MiB
    assert memory.used_bytes() - before >= 100 << 20
    del block
    assert memory.used_bytes() == before
    assert memory.peak_bytes() - before >= 100 << 20
    memory.reset_peak()
    assert memory.peak_bytes() == before
    assert 0 < memory.available_bytes() <= memory.total_bytes()
