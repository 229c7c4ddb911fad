import json

import pytest

from muon_shard import article
from muon_shard.__main__ import main
from muon_shard.simulate import simulate


@pytest.fixture(scope="module")
def replayed():
    return article.replay()


def test_the_stand_in_is_what_it_says():
    leaves = article.dense() | article.experts()
    assert sum(x.size for x in leaves.values()) == pytest.approx(104e9, rel=0.01)
    assert sum(x.shape == article.HYPER for x in leaves.values()) == 74
    scattered = article.dense() | article.scattered_experts()
    assert {name: x.shape for name, x in scattered.items()} == {name: x.shape for name, x in leaves.items()}


def test_the_figures_are_the_published_ones(replayed):
    published = [(f.published_ms, round(f.published, 2)) for f in replayed.figures]
    assert published == [
        ((485, 129), 3.76),
        ((4.9, 1.1), 4.45),
        ((74, 2.4), 30.83),
        ((), 2),
        ((), 7),
        ((2700, 450), 6),
    ]


def test_ratios_that_are_reached_and_those_that_cannot_be(replayed):
    reached = {f.name: f.reached for f in replayed.figures}
    assert reached == {
        "de-duplication over FSDP": False,
        "one expert tensor in place": False,
        "fusion of 74 × [24, 10240]": True,
        "replica sharing, whole step": True,
        "replica sharing, compute": True,
        "all together": False,
    }
    for f in replayed.figures:
        assert f.before > f.after and f.predicted == f.before / f.after  # each is a gain, as published
        assert f.unknown.endswith(".") and "given" in f.unknown


def test_the_constants_are_those_the_article_gives(replayed):
    """One small matrix takes 1.0 ms, and no other split of the 64 has its baseline nearer to 2.7 s."""
    fusion, everything = replayed.figures[2], replayed.figures[-1]
    assert fusion.before / 74 == pytest.approx(1.0e-3, rel=0.03)
    dense = article._run(article.dense(), "redundant", (), article.ONE_BY_ONE).makespan

    def baseline(ways):
        mesh = article.split(ways)
        return dense + article._run(article.scattered_experts(mesh), "redundant", (), article.ONE_BY_ONE, mesh).makespan

    assert everything.before == pytest.approx(baseline(8), rel=1e-3)
    assert min((2, 4, 8, 16, 32, 64), key=lambda ways: abs(baseline(ways) - 2.7)) == 8


def test_parts_of_a_time():
    assert article._rest(10 + 64, 10 + 1, 64) == pytest.approx(10)


def test_ours_beats_the_published_scheme(replayed):
    assert replayed.ours.makespan < replayed.figures[-1].after
    # Not only because nothing is launched one by one.
    params = article.dense() | article.experts()
    options = article.PlanOptions(topology=article.machine(), transport="gather", dedup_axes="all", ns_method="direct")
    assert replayed.ours.makespan < simulate(article._plan(params, options), article.machine()).makespan


def test_command(replayed, capsys):
    assert main(["simulate", "--article"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert out == f"{replayed}\n"
    for f in replayed.figures:
        assert f.name in out and f"{f.published:.2f}×" in out and f"{f.predicted:.2f}×" in out
    for part in ("104B", "ascend-a3", "25 launches of 40 µs", "2,700 → 450", "Our automatic plan"):
        assert part in " ".join(out.split()), part
    assert out.count("!") == 2 * 3  # a mark and a sentence for each that is not reached


def test_command_prints_json(capsys):
    assert main(["simulate", "--article", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["within_30_percent"] for f in found["figures"]] == [False, False, True, True, True, False]
    assert found["auto_plan_ms"] > found["auto_plan_compute_ms"] > 0
