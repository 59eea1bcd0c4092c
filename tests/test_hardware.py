"""The table of GPUs, and how many programs a processor holds."""

from __future__ import annotations

import pytest
import torch

from flash_decoding.hardware import find_gpu, known_gpus, match_device, present_gpu, resident_programs


def test_every_gpu_has_a_source_and_plausible_facts():
    for gpu in known_gpus().values():
        assert len(gpu.source) > 10
        assert 16 <= gpu.processors <= 200
        assert 200 <= gpu.gb_per_s <= 10_000
        assert 4 <= gpu.l2_mb <= 200
        assert gpu.limits.shared_per_program + 1024 <= gpu.limits.shared_per_processor


def test_the_facts_that_kernels_are_built_on():
    # Shared memory per program: 99 KB on the article's card, 163 KB on A100, 227 KB on Hopper.
    shared = {key: find_gpu(key).limits.shared_per_program for key in ("rtx4060", "a100", "h100", "h200")}
    assert shared == {"rtx4060": 99 * 1024, "a100": 163 * 1024, "h100": 227 * 1024, "h200": 227 * 1024}
    assert find_gpu("rtx4060").processors == 24
    assert find_gpu("H200").processors == 132


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"gpu must be one of rtx4060, .*h200.*, got 'voodoo'"):
        find_gpu("voodoo")


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4060", "rtx4060"),
        ("NVIDIA GeForce RTX 4060 Ti", None),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", None),
        ("NVIDIA L40", None),
        ("Radeon", None),
    ],
)
def test_device_names(device: str, key: str | None):
    found = match_device(device)
    assert (found.key if found else None) == key


def test_resident_programs_by_each_limit():
    limits = find_gpu("h200").limits
    assert resident_programs(limits, shared=0, num_warps=1) == 32
    assert resident_programs(limits, shared=0, num_warps=8) == 8
    assert resident_programs(limits, shared=70 * 1024, num_warps=4) == 3
    assert resident_programs(limits, shared=0, num_warps=4, registers=128) == 4
    assert resident_programs(limits, shared=300 * 1024, num_warps=4) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_is_none():
    assert present_gpu() is None


def test_an_unknown_gpu_is_described_by_its_driver(monkeypatch):
    class Device:
        name, major, minor, multi_processor_count = "NVIDIA Future 1", 9, 0, 99
        L2_cache_size, total_memory = 50 << 20, 80 << 30
        memory_clock_rate, memory_bus_width = 2_619_000, 5120

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Device)
    gpu = present_gpu()
    assert gpu is not None
    assert (gpu.name, gpu.processors, gpu.limits.shared_per_program) == ("NVIDIA Future 1", 99, 227 * 1024)
    assert gpu.gb_per_s == pytest.approx(3352, rel=0.01)


def test_a_known_gpu_keeps_its_own_count_of_processors(monkeypatch):
    class Device:
        name, multi_processor_count = "NVIDIA H200", 120

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Device)
    gpu = present_gpu()
    assert gpu is not None
    assert (gpu.key, gpu.processors, gpu.gb_per_s) == ("h200", 120, 4800)
