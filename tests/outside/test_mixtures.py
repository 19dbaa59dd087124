"""Mixtures and hybrids of transformers: read from what ``save_pretrained`` wrote, and written as it writes them."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import fshard as fs
from fshard import tree
from fshard.errors import TreeError
from tests.outside.mixtures import MIXTURES, mixture

pytest.importorskip("transformers")

QUICK = ("MixtralForCausalLM", "DeepseekV3ForCausalLM", "OlmoHybridForCausalLM")
"""Experts stacked, experts with a bias that is a buffer, and matrices cut in parts."""


def planned(model: Any, mesh: Any) -> fs.Plan:
    """All leaves shared by all ranks."""
    return fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))


def read_and_written(module: nn.Module, folder: Path, world: int) -> list[str]:
    """The leaves, and the tensors of files, that are not those of ``transformers``."""
    module.save_pretrained(folder / "theirs")
    model = fs.split(module, units="auto")

    def run() -> list[str]:
        plan = planned(model, fs.make_mesh((-1,), ("data",)))
        state = fs.io.load_hf(folder / "theirs", plan)
        full = dict(tree.paths(fs.unshard(state.params, plan)))
        fs.io.save_hf(state, folder / "ours", config=module.config)
        return [path for path, leaf in tree.paths(model.params) if not torch.equal(leaf, full[path])]

    wrong = sum(fs.virtual_mesh((world,), ("data",)).run(run), [])
    ours, theirs = (safetensors.torch.load_file(folder / kind / "model.safetensors") for kind in ("ours", "theirs"))
    wrong += [f"not in both: {name}" for name in ours.keys() ^ theirs.keys()]
    return wrong + [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_some_mixtures_are_read_and_written(name: str, tmp_path: Path) -> None:
    assert read_and_written(mixture(name), tmp_path, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("world", [1, 3])
def test_every_mixture_is_read_and_written(name: str, world: int, tmp_path: Path) -> None:
    module = mixture(name)
    assert read_and_written(module, tmp_path, world) == []
    _, info = type(module).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.long
def test_each_rank_reads_its_own_part_of_stacked_experts(tmp_path: Path) -> None:
    from fshard.interchange.hf_files import HfFiles
    from fshard.interchange.hf_names import Converted, family
    from fshard.interchange.source import load

    module = mixture("MixtralForCausalLM")
    module.save_pretrained(tmp_path)
    model, read = fs.split(module), list[int]()

    class Spy(HfFiles):
        def read(self, name: str, parts: Any) -> None:
            read.append(sum(out.numel() for _, out in parts))
            super().read(name, parts)

    for rank in range(4):
        plan = planned(model, fs.abstract_mesh((4,), ("data",), rank=rank))
        read.clear()
        state = load(plan, None, Converted(Spy(tmp_path), family(plan)))
        assert sum(read) == sum(leaf.numel() for leaf in tree.leaves(state.params))


@pytest.mark.long
def test_rules_of_users_come_before_the_mapping(tmp_path: Path) -> None:
    module = mixture("MixtralForCausalLM")
    module.save_pretrained(tmp_path)
    plan = planned(fs.split(module), fs.make_mesh((1,), ("data",)))
    head = [(r"lm_head\.weight", None)]
    with pytest.raises(TreeError, match=r"missing     lm_head.weight"):
        fs.io.load_hf(tmp_path, plan, rename=head)
    state = fs.io.load_hf(tmp_path, plan, rename=head, init=[(r"lm_head\.weight", fs.init.ones())])
    whole = fs.io.to_state_dict(state)
    assert whole["lm_head.weight"].eq(1).all()
    path = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(whole[path], module.get_parameter(path))
    fs.io.save_hf(state, tmp_path / "stacked", rename=[(r"(.*experts\.gate_up_proj)", r"all.\1")])
    written = safetensors.torch.load_file(tmp_path / "stacked" / "model.safetensors")
    assert torch.equal(written[f"all.{path}"], whole[path])
    assert any("experts.3.w2" in name for name in written) and not any("experts.3.w1" in name for name in written)


@pytest.mark.long
def test_buffers_of_files_are_the_modules_or_fill_it(tmp_path: Path) -> None:
    module, other = mixture("DeepseekV3ForCausalLM"), mixture("DeepseekV3ForCausalLM")
    path = "model.layers.1.mlp.gate.e_score_correction_bias"
    other.get_buffer(path).copy_(torch.arange(4.0))
    other.save_pretrained(tmp_path)
    model = fs.split(module)
    plan = planned(model, fs.make_mesh((1,), ("data",)))
    with pytest.raises(TreeError, match=rf"other values of buffers.*\n  {path}  \[4\]\n.*buffers=model.buffers"):
        fs.io.load_hf(tmp_path, plan)
    state = fs.io.load_hf(tmp_path, plan, buffers=model.buffers)
    assert torch.equal(module.get_buffer(path), torch.arange(4.0))
    fs.io.save_hf(state, tmp_path / "again")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")[path], torch.arange(4.0))


def other_prefixes() -> nn.Module:
    """A model of pictures and words, whose files have the names of an earlier module."""
    import transformers

    text = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "gemma"}
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    seen |= {"image_size": 16, "patch_size": 4, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=seen, projection_dim=32, image_token_index=60)
    return transformers.PaliGemmaForConditionalGeneration(config)


def unsaved_tables() -> nn.Module:
    """A model whose tables of positions are leaves, but not in its files."""
    import transformers

    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.MarianConfig(
        vocab_size=61, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, pad_token_id=60,
        decoder_start_token_id=60, eos_token_id=0, forced_eos_token_id=0, **layers,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


@pytest.mark.long
@pytest.mark.parametrize("make", [other_prefixes, unsaved_tables])
def test_other_prefixes_and_tables_that_are_not_saved(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = make()
    assert read_and_written(module, tmp_path, 2) == []
    names = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors").keys()
    assert names != dict(module.state_dict()).keys()
