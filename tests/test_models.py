"""Inventories of public models: counts that their authors publish, and usual shardings."""

import math

import pytest

from muon_shard import models

MESHES = [
    {"fsdp": 8},
    {"replica": 4, "fsdp": 64},
    {"data": 2, "fsdp": 16, "tensor": 8},
    {"expert": 8, "fsdp": 8},
    {"replica": 2, "expert": 4, "fsdp": 8, "tensor": 2},
    {"x": 32},
    {"data": 16},
]


def test_names_are_slugs():
    names = models.names()
    assert len(names) == len(set(names)) == 15
    assert all(name == name.lower() and " " not in name for name in names)
    assert {"deepseek-v3", "kimi-k2", "llama-3.1-405b", "smollm2-135m"} <= set(names)


@pytest.mark.parametrize("name", models.names())
def test_every_model_loads(name):
    model = models.load(name)
    assert model.name == name and model.title.lower() == name
    assert model.sources and model.confidence
    assert all(len(shape) >= 2 and min(shape) > 0 for shape in model.params.values())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 671),
        ("kimi-k2", 1026),
        ("qwen3-235b-a22b", 235),
        ("qwen3-30b-a3b", 30.5),
        ("gpt-oss-120b", 116.8),
        ("llama-3.1-405b", 405.8),
        ("llama-3.1-8b", 8.03),
        ("mixtral-8x7b", 46.7),
        ("moonlight-16b-a3b", 16),
        ("pangu-pro-moe-72b", 72),
        ("openpangu-ultra-moe-718b", 718),
        ("glm-4.5", 353),  # without the multi-token prediction layer
        ("smollm2-135m", 0.1345),
    ],
)
def test_parameters_add_up_to_the_published_size(name, billions):
    assert models.load(name).num_params == pytest.approx(billions * 1e9, rel=0.01)


def test_one_leaf_per_layer_and_experts_stacked():
    params = models.load("deepseek-v3").params
    assert params["layers.attn.q_a_proj.0"] == params["layers.attn.q_a_proj.60"] == (7168, 1536)
    assert "layers.attn.q_a_proj.61" not in params
    assert params["layers.experts.down_proj.57"] == (256, 2048, 7168)
    assert params["layers.router.0"] == (7168, 256)
    assert params["embed"] == (129280, 7168)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="'gpt-5'.*deepseek-v3.*smollm2-135m"):
        models.load("gpt-5")


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_specs_are_legal(name, mesh):
    model = models.load(name)
    specs = models.specs(model, mesh)
    assert specs.keys() == model.params.keys()
    for path, spec in specs.items():
        shape = model.params[path]
        used = [axis for axis in spec if axis]
        assert len(spec) == len(shape) and len(used) == len(set(used))
        assert not {"replica", "data"} & set(used)
        for dim, axis in zip(shape, spec, strict=True):
            assert axis is None or dim % mesh[axis] == 0


@pytest.mark.parametrize(
    ("name", "path", "mesh", "spec"),
    [
        ("llama-3.1-8b", "layers.attn.k_proj.0", {"fsdp": 8}, ("fsdp", None)),
        ("llama-3.1-8b", "layers.attn.k_proj.0", {"fsdp": 8, "tensor": 4}, ("fsdp", "tensor")),
        ("llama-3.1-8b", "layers.attn.k_proj.0", {"data": 2, "model": 8}, ("model", None)),
        ("llama-3.1-8b", "layers.attn.k_proj.0", {"data": 8}, (None, None)),
        ("gpt-oss-120b", "layers.attn.q_proj.0", {"fsdp": 128}, (None, "fsdp")),  # 2880 = 64 * 45
        ("gpt-oss-120b", "layers.attn.q_proj.0", {"fsdp": 128, "tensor": 2}, ("tensor", "fsdp")),
        ("mixtral-8x7b", "layers.experts.up_proj.0", {"fsdp": 8}, ("fsdp", None, None)),
        ("mixtral-8x7b", "layers.experts.up_proj.0", {"fsdp": 16}, (None, "fsdp", None)),
        ("mixtral-8x7b", "layers.experts.up_proj.0", {"expert": 8, "fsdp": 16}, ("expert", "fsdp", None)),
        ("modded-nanogpt-2026-08", "mlp_bank", {"fsdp": 8}, (None, None, "fsdp", None)),
    ],
)
def test_specs_shard_as_usual(name, path, mesh, spec):
    assert models.specs(models.load(name), mesh)[path] == spec


def test_banks_hold_many_matrices():
    assert math.prod(models.load("modded-nanogpt-2026-08").params["mlp_bank"]) == 24 * 3072 * 768
