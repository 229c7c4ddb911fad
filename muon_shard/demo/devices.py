"""Which devices the demo runs on, and their mesh."""

from __future__ import annotations

import math

import jax

import muon_shard

from .config import DemoConfig

EMULATED_DEVICES = 8


def start_devices(config: DemoConfig) -> list[jax.Device]:
    """Real devices where there are any to speak of, emulated CPU devices otherwise.

    `config.devices` asks for emulation outright. Without it the CPU backend alone is told to show several devices:
    accelerators stay the default where present, and nothing has to be started to find out.
    """
    if config.devices is not None:
        _emulate(config.devices)
    elif jax.config.jax_num_cpu_devices < 1:
        count = math.prod(dict(config.mesh).values()) if config.mesh else EMULATED_DEVICES
        try:
            jax.config.update("jax_num_cpu_devices", count)
            # Emulated devices share few cores: asynchronous dispatch can starve a collective of its last participant.
            jax.config.update("jax_cpu_enable_async_dispatch", False)
        except RuntimeError:
            pass  # The backend runs already (a notebook, say): what it shows is what there is.
    return jax.devices()


def _emulate(count: int) -> None:
    """Emulate `count` CPU devices, unless the running backend already shows exactly these."""
    try:
        muon_shard.emulate_devices(count)
    except RuntimeError as error:
        if jax.default_backend() != "cpu" or jax.device_count() != count:
            raise ValueError(
                f"devices={count}: JAX already runs with {jax.device_count()} {jax.default_backend()} device(s). "
                "Ask for the devices before JAX is first used."
            ) from error


def describe(devices: list[jax.Device]) -> str:
    """One phrase that says what the numbers below were measured on."""
    if devices[0].platform == "cpu":
        return f"{len(devices)} emulated CPU devices" if len(devices) > 1 else "1 CPU device"
    return f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform})"


def make_mesh(config: DemoConfig, devices: list[jax.Device]) -> jax.sharding.Mesh:
    """The mesh asked for, or replica × fsdp over all devices. Axes are Auto: `optax.contrib.muon` runs on no other."""
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
