"""What is found out about a CPU."""

from pathlib import Path

from quantpipe.plan.host_speed import has_dot_products, measure_host


def test_dot_products_are_known_by_their_feature(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name : some\nflags : fpu avx2 avx512_vnni\n", encoding="utf-8")
    assert has_dot_products(info)
    info.write_text("flags : fpu avx2\n", encoding="utf-8")
    assert not has_dot_products(info)
    assert not has_dot_products(tmp_path / "absent")


def test_both_speeds_are_measured() -> None:
    speed = measure_host(num_cores=1)
    assert speed.bandwidth_bytes_per_s > 1e8
    assert speed.flops_per_s > 1e8
