"""Many processes do what one does."""

import pytest

from benchmarks import processes


@pytest.mark.slow
@pytest.mark.parametrize(("case", "count"), [("hsdp", 2), ("two_dimensional", 4)])
def test_the_same_updates_as_in_one_process(case, count):
    found = processes.compare(case, count)
    assert found["replicas_equal"]
    assert found["largest_difference"] <= 1e-6  # measured: 0


@pytest.mark.slow
def test_a_process_that_fails_is_heard_of():
    with pytest.raises(RuntimeError, match=r"(?s)process 0 of 1 exited with 2.*invalid choice: 'nonesuch'"):
        processes.launch("nonesuch", 1)
