"""Pictures and tables show what the files hold, and say what they lack."""

import json
import sys

import bench_outputs
import pytest

from benchmarks import results, tables

pytest.importorskip("matplotlib")

from benchmarks import pictures  # noqa: E402


def found(tmp_path, outputs=bench_outputs.ALL):
    return results.read([bench_outputs.results_file(tmp_path / "results.json", outputs)])


def texts(figure):
    """All that is written in a figure."""
    return [text.get_text() for text in figure.findobj(lambda x: hasattr(x, "get_text") and x.get_text())]


# Reading


def test_results_files_and_outputs_are_told_apart(tmp_path):
    single = tmp_path / "step.txt"
    single.write_text("a word before\n" + json.dumps(bench_outputs.STEP | {"rounds": 9}) + "\n")
    read = results.read([bench_outputs.results_file(tmp_path / "results.json"), single])
    assert read.last("step", set="reference")["rounds"] == 9
    assert read.last("step", set="mixed") is None
    assert read.last("scaling") == bench_outputs.SCALING
    assert read.last("planning") is None
    assert read.machine["cores"] == 2
    assert set(read.found) == {
        *("step", "scaling", "transports", "newton_schulz", "end_to_end", "article", "breadth", "accelerator"),
    }


@pytest.mark.parametrize(("content", "message"), [("[1, 2]", "no JSON object"), ('{"a": 1}', "neither a results file")])
def test_other_files_raise(tmp_path, content, message):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        results.read([path])


# Pictures


def test_every_picture_is_written(tmp_path, monkeypatch, capsys):
    file = bench_outputs.results_file(tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["pictures", str(file), "--out", str(tmp_path / "out")])
    monkeypatch.setattr(pictures, "DPI", 50)
    pictures.main()
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    assert report["left_out"] == [] and err == ""
    assert len(report["written"]) == len(pictures.PICTURES)
    for path in report["written"]:
        with open(path, "rb") as png:
            assert png.read(8) == b"\x89PNG\r\n\x1a\n"


def test_what_is_missing_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    file = bench_outputs.results_file(tmp_path / "results.json", [bench_outputs.SCALING])
    monkeypatch.setattr(sys, "argv", ["pictures", str(file), "--out", str(tmp_path / "out")])
    monkeypatch.setattr(pictures, "DPI", 50)
    pictures.main()
    out, err = capsys.readouterr()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["scaling.png", "summary.png"]
    assert set(json.loads(out)["left_out"]) == {*pictures.PICTURES} - {"scaling", "summary"}
    assert "article.png is left out" in err
    said = "\n".join(texts(pictures.summary(found(tmp_path, [bench_outputs.SCALING]))))
    assert said.count("python -m benchmarks.step --set reference") == 3


def test_bars_are_as_long_as_what_was_measured(tmp_path):
    time, moved, memory = pictures.step(found(tmp_path)).axes
    peers = bench_outputs.STEP["peers"]
    assert [bar.get_width() for bar in time.containers[0]] == [p["ms_median"] for p in peers.values()]
    assert [t.get_text() for t in time.texts] == [
        f"{p['ms_median']:,.0f} ms, {p['ratio_to_ours']:g}×" for p in peers.values()
    ]
    assert "gather" in [label.get_text() for label in time.get_yticklabels()]  # a peer nobody named
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in zip(*moved.containers, strict=True)]
    assert ends == pytest.approx([p["total_bytes"] / 1e6 for p in peers.values()])
    assert moved.texts[0].get_text() == "15 MB in 4" and moved.texts[-1].get_text() == "none"
    assert [bar.get_width() for bar in memory.containers[0]] == [p["temp_bytes"] / 1e6 for p in peers.values()]
    assert memory.texts[1].get_text() == "50 MB, 1.25×"


def test_scaling_lines_against_the_ideal(tmp_path):
    figure = pictures.scaling(found(tmp_path))
    ideal, best, strong, weak = figure.axes[0].lines
    assert list(ideal.get_ydata()) == [64, 8, 1]
    assert list(best.get_ydata()) == pytest.approx([64, 8, 1 / 0.9])
    assert list(strong.get_ydata()) == [64, 8, 2]
    assert list(weak.get_ydata()) == [8, 8]
    assert [text.get_text() for text in figure.axes[0].texts] == ["100%", "50%"]
    seconds = {line.get_label(): list(line.get_xdata()) for line in figure.axes[4].lines}
    assert seconds == {"fixed work, (fsdp n)": [1, 8], "fixed work, (replica 2, fsdp n/2)": [8]}


def test_article_compares_compute_with_flops(tmp_path):
    (axes,) = pictures.PICTURES["article"](found(tmp_path)).axes
    told = {bars.get_label(): [bar.get_x() + bar.get_width() for bar in bars] for bars in axes.containers}
    assert told["published"] == [30.8, 2, 7, 6]
    assert told["time measured here"] == pytest.approx([22, 1.6, 6.4, 5])
    assert told["NS FLOPs here"] == [2, 8]
    said = [text.get_text() for text in axes.texts]
    assert "22× (74 × [24, 80])" in said and "8× (replica 8, fsdp 1)" in said


def test_every_panel_has_a_title_and_units(tmp_path):
    everything = found(tmp_path)
    for name, picture in pictures.PICTURES.items():
        figure = picture(everything)
        assert figure.get_suptitle() and "commit 01234567" in figure.get_supxlabel(), name
        for axes in figure.axes:
            assert axes.get_xlabel() or axes.get_ylabel(), name


# Tables


def test_tables_say_what_was_measured(tmp_path, monkeypatch, capsys):
    file = bench_outputs.results_file(tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["tables", str(file)])
    tables.main()
    out, err = capsys.readouterr()
    assert "Measured at commit 01234567 on 2 cores (cpu), python 3.12, jax 0.12.0, optax 0.2.8." in out
    lines = out.splitlines()
    assert "| **`muon_shard.muon`** | 100 | 1 | 2 all-to-all, 2 all-gather | 15 | 40 |" in lines
    assert "| 8 (replica 2, fsdp 4) | 8 | 100.0% | 100.0% | 8 | 50 | 1.5 | 1.20 |" in lines
    assert "| 64 (fsdp 64) | 2 | 50.0% | 90.0% | 64 | 50 | 1.5 |  |" in lines
    assert "| 8 | `optax.contrib.muon` | 80 | 90.0 | 25.0% | 3.000 (20) | 3.100 (15) |" in lines
    assert "| replica sharing, compute | 7 | 7.5 | NS FLOPs 2 (replica 2, fsdp 4), 8 (replica 8, fsdp 1) |" in lines
    assert "| 74×24×80 | direct | 1.0 | 6.5 | 3.7 |" in lines
    assert "| square | `ring` | 20 | 30 | 2 |" in lines
    assert "| transformer | HSDP | float32 | 3 | 6 |" in lines
    assert "| bfloat16, peak 700 | 64×128 | auto | gram | 0.5 | 400 | 57.1% |" in lines
    assert "| bfloat16, peak 700 | 64×128 | gram | refused |  |  |  |" in lines
    assert "| bfloat16 | 1,000 | ours | 1,234.5 | 1 | 5 |" in lines
    assert "| float32 | 1,000 | failed: out of memory |  |  |  |" in lines
    assert "| m | 4,096 | 409.60 | 0.20 | 99.0% |" in lines
    assert "'mixed step' is left out" in err


def test_bars_are_held_against_measurements(tmp_path):
    rows = dict(line.strip("| ").split(" | ", 1) for line in tables.bars(found(tmp_path)).splitlines()[2:])
    assert rows == {
        "optax under GSPMD ÷ ours, HSDP (replica 2, fsdp 4)": "≥ 4 | 4.4 | yes",
        "redundant all-gather ÷ ours": "≥ 8 | 7.9 | **no**",
        "headline replay, redundant and unfused ÷ ours": "≥ 6 | 6.5 | yes",
        "bytes moved, optax under GSPMD ÷ ours": "≥ 15 | 20 | yes",
        "NS FLOPs per device, 8 devices ÷ 1": "≤ 0.132 | 0.125 | yes",
        "temporaries, ours ÷ optax under GSPMD": "≤ 1.2 | 0.8 | yes",
    }
    assert tables.bars(found(tmp_path, [bench_outputs.NEWTON_SCHULZ])) is None
