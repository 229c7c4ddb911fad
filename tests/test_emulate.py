import subprocess
import sys

import jax
import pytest

import muon_shard


def test_calling_again_is_harmless():
    muon_shard.emulate_devices(8)
    assert jax.device_count() == 8


def test_too_late_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"already runs on 8 cpu device\(s\).*fresh process"):
        muon_shard.emulate_devices(4)


@pytest.mark.parametrize("count", [1, 3])
def test_in_a_fresh_process(count):
    code = f"import muon_shard; muon_shard.emulate_devices({count}); import jax; print(jax.device_count())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(count)
