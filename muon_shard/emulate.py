"""Several devices on one CPU, for notebooks, tests and demos."""

import jax


def emulate_devices(count: int = 8) -> None:
    """Makes JAX see `count` CPU devices. Call it before anything else uses JAX.

    Raises:
        RuntimeError: when JAX has already started with other devices.
    """
    jax.config.update("jax_platforms", "cpu")
    # Asynchronous dispatch can deadlock CPU collectives when there are fewer cores than devices.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # already started: fine when it has the devices, and the check below says so when it has not
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise RuntimeError(
            f"emulate_devices({count}): JAX already runs on {jax.device_count()} {jax.default_backend()} device(s). "
            "Call emulate_devices first, in a fresh process, or restart the notebook's runtime."
        )
