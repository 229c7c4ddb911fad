"""Which devices the demo runs on, and their mesh."""

from __future__ import annotations

import math
import os
from typing import Any

import jax

import muon_shard
from muon_shard.demo.config import DemoConfig

EMULATED_DEVICES = 8
MOST_EMULATED = 256


def start_devices(config: DemoConfig) -> list[Any]:
    """Real devices where there are any to speak of, emulated CPU devices otherwise.

    `config.devices` asks for emulation outright. Without it only the CPU backend is told to show several
    devices: accelerators stay the default where present, and nothing has to be started to find out.
    """
    # Emulated devices share few cores: asynchronous dispatch can leave a collective waiting forever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    count = config.devices or (math.prod(dict(config.mesh).values()) if config.mesh else EMULATED_DEVICES)
    if count > MOST_EMULATED:
        raise ValueError(f"mesh of {count} devices: more than {MOST_EMULATED} are not emulated on one machine.")
    if config.devices is not None:
        muon_shard.emulate_devices(config.devices)
    elif not _cpu_devices_chosen():
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass  # The backend runs already (a notebook, say): what it shows is what there is.
    return jax.devices()


def _cpu_devices_chosen() -> bool:
    """Whether the user has said how many CPU devices there are, in either of the two ways JAX knows."""
    by_option = jax.config.jax_num_cpu_devices > 0  # pyright: ignore[reportAttributeAccessIssue]
    return by_option or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")


def describe(devices: list[Any]) -> str:
    """One phrase that says what the numbers below were measured on."""
    if devices[0].platform == "cpu":
        return f"{len(devices)} emulated CPU devices" if len(devices) > 1 else "1 CPU device"
    return f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform})"


def make_mesh(config: DemoConfig, devices: list[Any]) -> jax.sharding.Mesh:
    """The mesh asked for, or replica × fsdp over all devices.

    Axes are Auto: `optax.contrib.muon`, the reference, raises on Explicit ones.
    """
    axes = dict(config.mesh) if config.mesh else _default_axes(len(devices))
    if math.prod(axes.values()) != len(devices):
        asked = ",".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"mesh {asked} needs {math.prod(axes.values())} devices, but there are {describe(devices)}; "
            "change the mesh or the number of devices."
        )
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)


def _default_axes(count: int) -> dict[str, int]:
    """HSDP with two replicas where that leaves a shard group worth the name, plain FSDP otherwise."""
    return {"replica": 2, "fsdp": count // 2} if count >= 4 and count % 2 == 0 else {"fsdp": count}
