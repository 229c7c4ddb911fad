"""What the ahead-of-time benchmark reads from modules, and what it says where a compiler is missing."""

import io
import json
import sys

import jax
import pytest
from rich.console import Console

import muon_shard
from benchmarks import ahead_of_time
from benchmarks.ahead_of_time import Case, bracketed, cases, main, overlap, table

PAIR = """\
%g (x: f32[1024]) -> f32[1024] {{
  ROOT %copy = f32[1024]{{0}} copy(%x)
}}

%dots (x: f32[1024]) -> f32[1024] {{
  ROOT %dot = f32[32,32]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%fused (x: f32[1024]) -> f32[1024] {{
  ROOT %fusion = f32[1024]{{0}} fusion(%x), kind=kOutput, calls=%dots
}}

ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %all-to-all-start = ((f32[1024]{{0:T(1024)}}), f32[1024]{{0}}) all-to-all-start(%x), replica_groups={{{{0,1}}}}{sync}
  {between}
  ROOT %all-to-all-done = f32[1024]{{0}} all-to-all-done(%all-to-all-start)
}}
"""
BLOCKING = ', backend_config={"collective_backend_config":{"is_sync":true}}'
WORK = {
    "a fusion": ("%f = f32[1024]{0} fusion(%y), kind=kLoop, calls=%g", "work"),
    "a fusion that holds a product": ("%f = f32[1024]{0} fusion(%y), kind=kOutput, calls=%dots", "NS"),
    "a conditional with a tuple": (
        "%c = (f32[8]{0}, /*index=1*/f32[1024]{0}) conditional(%i, %a, %b), branch_computations={%g, %fused}",
        "NS",
    ),
    "a conditional that only copies": (
        "%c = f32[1024]{0} conditional(%i, %a, %b), branch_computations={%g, %g}",
        "work",
    ),
    "a product by a library": ('%d = f32[32,32]{1,0} custom-call(%y), custom_call_target="__cublas$gemm"', "NS"),
    "a counter": ("%n = s32[1]{0} fusion(%y), kind=kLoop, calls=%g", ""),
    "an element of a tuple": ("%e = f32[1024]{0} get-tuple-element(%t), index=0", ""),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("between", WORK)
def test_what_can_hide_a_collective(between):
    line, what = WORK[between]
    text = PAIR.format(between=line, sync="")
    assert dict(bracketed(text)) == {"all-to-all-start": what}
    assert overlap(text) == {"async": 1.0, "overlap": float(what != ""), "ns_overlap": float(what == "NS")}


def test_a_pair_that_blocks_is_not_asynchronous():
    text = PAIR.format(between=WORK["a fusion"][0], sync=BLOCKING)
    assert overlap(text) == {"async": 0.0, "overlap": 0.0, "ns_overlap": 0.0}


def test_shares_are_of_bytes_and_work_counts_for_all_that_run():
    text = """\
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %p.1 = (f32[1024]{0}, f32[1024]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %p.2 = (f32[1024]{0}, f32[1024]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %d.1 = f32[1024]{0} collective-permute-done(%p.1)
  %f = f32[1024]{0} fusion(%d.1), kind=kLoop, calls=%g
  %d.2 = f32[1024]{0} collective-permute-done(%p.2)
  ROOT %g.1 = f32[2048]{0} all-gather(%f), replica_groups={{0,1}}, dimensions={0}
}
"""
    assert overlap(text) == {"async": 0.5, "overlap": 0.25, "ns_overlap": 0.0}


@pytest.mark.parametrize(("opcode", "share"), [("convolution", 1.0), ("convert", 0.0)])
def test_a_chain_of_fusions_on_tpu_is_asynchronous_and_holds_work(opcode, share):
    text = """\
%start (p: bf16[64]) -> bf16[512] {
  %all-gather.5 = bf16[512]{0} all-gather(%p), replica_groups={}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c.1 = bf16[512]{0} custom-call(%all-gather.5), custom_call_target="AsyncCollectiveStart"
}

%between (p: bf16[64], q: bf16[32,32]) -> bf16[32,32] {
  %all-gather.7 = bf16[512]{0} all-gather(%p), replica_groups={}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c.2 = bf16[32,32]{1,0} OPCODE(%q)
}

ENTRY %main (x: bf16[64]) -> bf16[512] {
  ROOT %async-collective-start = bf16[512]{0} fusion(%x), kind=kCustom, calls=%start
  %async-collective-fusion = bf16[32,32]{1,0} fusion(%x), kind=kCustom, calls=%between
}
""".replace("OPCODE", opcode)
    assert overlap(text) == {"async": 1.0, "overlap": 1.0, "ns_overlap": share}


def test_one_sentence_for_each_missing_compiler(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("no such topology; cannot go on. See [the manual]\nfor more")

    monkeypatch.setattr(ahead_of_time.topologies, "get_topology_desc", missing)
    console = Console(file=io.StringIO(), width=60)
    assert list(cases(["tpu-v5e", "h100"], ["ring"], console)) == []
    assert console.file.getvalue().splitlines() == [
        "tpu-v5e is left out, its compiler is not here (no such topology). Consider pip install 'jax[tpu]'.",
        "h100 is left out, its compiler is not here (no such topology). Consider pip install 'jax[cuda12]'.",
    ]


@pytest.fixture
def eight_devices(monkeypatch):
    """A target that is here: the emulated devices, with a mesh for every transport."""
    meshes = ({"replica": 2, "fsdp": 4}, {"replica": 2, "host": 2, "chip": 2})
    here = ahead_of_time.Target("cpu", "", meshes, "nothing")
    monkeypatch.setattr(ahead_of_time.Target, "devices", lambda self: jax.devices())
    monkeypatch.setattr(ahead_of_time, "TARGETS", {"generic": here})


def test_every_transport_but_local_gets_a_mesh(eight_devices):
    found = [str(case) for case in cases(["generic"], ahead_of_time.TRANSPORTS, Console())]
    assert {name.split()[-1] for name in found} == {*ahead_of_time.TRANSPORTS} - {"local"}
    assert "generic (replica 2, fsdp 4) two_hops" not in found
    assert "generic (replica 2, host 2, chip 2) two_hops" in found


def test_the_command_writes_a_table_and_json(eight_devices, monkeypatch, tmp_path, capsys):
    def only_all_to_all(case, params, options):
        if case.transport == "ring":
            raise ValueError("ring [does not] compile")
        return compiled(case, params, options)

    compiled = ahead_of_time.compiled
    monkeypatch.setattr(ahead_of_time, "compiled", only_all_to_all)
    arguments = ["--transports", "all_to_all", "ring", "--layers", "1", "--width", "32", "--dump", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ahead_of_time", *arguments, "--json", str(tmp_path / "facts.json")])
    main()
    out, err = capsys.readouterr()
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    assert "generic (replica 2, fsdp 4) ring: ValueError: ring [does not] compile" in err
    facts = json.loads((tmp_path / "facts.json").read_text())["cases"]
    assert ["error" in case for case in facts] == [False, True, False, True]
    # XLA on CPU widens bf16: the audit must see it.
    assert facts[0]["found_bytes"] == 2 * facts[0]["planned_bytes"] > 0
    assert "resized" in out and "error" in out
    assert (tmp_path / "generic-replica-2-fsdp-4-all_to_all.txt").read_text().startswith("HloModule")


def test_a_table_without_cases_has_no_rows():
    assert table([]).row_count == 0


def test_a_case_says_what_it_is():
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
    assert str(Case("h100", mesh, "ring")) == "h100 (replica 2, fsdp 4) ring"


def test_waves_are_cut_from_the_buffers_of_one(eight_devices):
    (one, *_), (case, *_) = (list(cases(["generic"], ["all_to_all"], Console(), waves, [3])) for waves in (1, 2))
    params = ahead_of_time.model(case.mesh, 2, 32)
    assert str(one) == "generic (replica 2, fsdp 4) all_to_all"
    assert str(case) == "generic (replica 2, fsdp 4) all_to_all, 2 waves, 3 under way"
    assert one.options(params).max_wave_bytes == "auto"
    options = case.options(params)
    assert options.waves_under_way == 3
    assert len(muon_shard.make_plan(params, options=options).parts[0].waves) == 2
