"""Fine-tune a Llama of Hugging Face transformers with low-rank adapters, sharded over however many ranks there are.

Run it as `python examples/finetune_lora.py`, or as `torchrun --nproc-per-node 4 examples/finetune_lora.py`. Nothing is
downloaded: a small model is made from its config, learns bytes of English from CPython's documentation, and is saved
as safetensors. That file is then read straight into shards, adapters learn the Zen of Python by heart (Hu et al. 2021),
and what they learned is merged into a model that transformers loads.
"""

import codecs
import contextlib
import io
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import fshard as fs

try:
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit('this example needs transformers and tqdm: pip install "fshard[examples]"') from None

PROMPT = "Beautiful is better than"


def zen() -> str:
    """The Zen of Python, which `import this` prints, and hides from search by a simple code."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13").partition("\n\n")[2]


def windows(text: str, length: int) -> Tensor:
    """All windows of a text's bytes, (count, length): a view."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).unfold(0, length, 1)


def make(config: LlamaConfig) -> fs.Model:
    """The model of a config. Its parameters take no memory, its layers are units."""
    with fs.empty_weights():
        return fs.split(LlamaForCausalLM(config).train(), units="auto")


def loss_of(model: fs.Model) -> Any:
    """The loss that transformers computes: the mean cross-entropy of the next byte."""

    def loss_fn(params: dict, rows: Tensor) -> Tensor:
        return model.apply(params, input_ids=rows, labels=rows, use_cache=False).loss

    return loss_fn


def train(what: str, step: Any, state: fs.TrainState, rows: Tensor, count: int, args: Namespace, mesh: fs.Mesh) -> Any:
    """Some steps on random windows. They depend on seed and step alone: any number of ranks sees the same."""
    losses = []
    with fs.track([fs.trackers.JsonLines(args.out / f"{what}.jsonl")], step) as track:
        for i in (bar := tqdm(range(count), desc=what, unit="step", disable=mesh.rank != 0)):
            draw = torch.Generator().manual_seed(args.seed + 1000 * i)
            chosen = torch.randint(len(rows), (args.batch,), generator=draw)
            state, metrics = step(state, state.plan.local_batch(rows[chosen]).long().to(mesh.device))
            losses.append(metrics.loss.item())
            track(state.step, metrics)
            if i % 10 == 0:
                bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    if mesh.rank == 0 and losses:
        shown = [losses[i] for i in sorted({*range(0, count, max(1, count // 5)), count - 1})]
        tqdm.write(f"{what}: loss " + ", ".join(f"{loss:.3f}" for loss in shown))
    return state


def pretrain(args: Namespace, config: LlamaConfig, mesh: fs.Mesh) -> None:
    """A model to start from: all its parameters learn. It is written as transformers writes one."""
    model = make(config)
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.adamw(
        fs.optim.schedules.warmup_cosine(1e-2, warmup=10, total=max(11, args.pretrain)), betas=(0.9, 0.95)
    )
    init = [(r".*norm\.weight", fs.init.ones()), (r".*", fs.init.normal(0.05))]
    state = fs.init_state(plan, opt, seed=args.seed, init=init)
    rows = windows("".join(topics[name] for name in sorted(topics)), args.context)
    step = fs.make_train_step(loss_of(model), opt, plan, clip_norm=1.0)
    state = train("pretraining", step, state, rows, args.pretrain, args, mesh)
    fs.io.save_hf(state, args.out / "base", config=config, overwrite=True)


def finetune(args: Namespace, config: LlamaConfig, mesh: fs.Mesh) -> None:
    """Adapters learn, all else is frozen. Then they are merged."""
    bare = make(config)
    model = fs.lora.wrap(bare, r".*_proj\.weight", rank=args.rank, alpha=2.0 * args.rank, seed=args.seed)
    # On GPUs the frozen base can be kept in host memory: put fs.Rule(r"(?!.*_lora_).*", fs.fsdp("data"),
    # memory_kind="pinned_host") before the other rule. See docs/memory-kinds.md.
    base = fs.Rule(r".*_proj\.weight", fs.fsdp("data"), packed=args.packed)  # the frozen weights beside adapters
    plan = fs.make_plan(model, mesh, [base, (r".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.adamw(args.lr)
    adapters = [(r".*_lora_a", fs.init.kaiming_uniform(a=5**0.5)), (r".*_lora_b", fs.init.zeros())]
    state = fs.io.load_hf(args.out / "base", plan, opt, init=adapters, seed=args.seed)  # each rank reads its shards
    if mesh.rank == 0:
        sizes = {kind: sum(x.numel for x in plan.leaves.values() if x.trainable == kind) for kind in (True, False)}
        tqdm.write(f"{sizes[False]:,} parameters are frozen, {sizes[True]:,} of adapters learn")

    rows = windows(zen(), args.context)
    step = fs.make_train_step(loss_of(model), opt, plan, clip_norm=1.0)
    state = train("fine-tuning", step, state, rows, args.steps, args, mesh)
    test = rows[:: max(1, len(rows) // 32)][:32].long()
    mine = plan.local_batch(test).to(mesh.device)
    final = fs.make_eval_step(loss_of(model), plan)(state, mine).item()

    whole = fs.lora.merge(fs.unshard(state.params, plan), alpha=2.0 * args.rank)
    plain = fs.make_plan(bare, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
    fs.io.save_hf(fs.shard(whole, plain), args.out / "tuned", plain, config=config, overwrite=True)
    if mesh.rank == 0:
        tuned = LlamaForCausalLM.from_pretrained(args.out / "tuned")
        with torch.no_grad():
            again = tuned(input_ids=test, labels=test).loss.item()
        tqdm.write(
            f"loss on 32 windows: {final:.4f} sharded with adapters, {again:.4f} merged and loaded by transformers"
        )
        prompt = torch.tensor([list(PROMPT.encode())])
        mask = torch.ones_like(prompt)
        out = tuned.generate(
            prompt, attention_mask=mask, max_new_tokens=args.context - prompt.shape[1], do_sample=False
        )
        tqdm.write(f"{args.out / 'tuned'} goes on:\n{bytes(out[0].tolist()).decode(errors='replace')}")


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """All of it."""
    if args.batch % mesh.size or 32 % mesh.size:
        raise SystemExit(f"--batch {args.batch} and 32 windows must be multiples of {mesh.size} (ranks)")
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.depth,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    pretrain(args, config, mesh)
    finetune(args, config, mesh)


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    folder = Path(tempfile.gettempdir()) / "fshard-lora"
    cli.add_argument("--out", type=Path, default=folder, help="folder for the two models, base and tuned")
    cli.add_argument("--pretrain", type=int, default=150, help="steps of the model that is adapted")
    cli.add_argument("--steps", type=int, default=200, help="steps of the adapters")
    cli.add_argument("--batch", type=int, default=32, help="windows in a step, over all ranks")
    cli.add_argument("--context", type=int, default=64, help="bytes in a window")
    cli.add_argument("--depth", type=int, default=3, help="layers")
    cli.add_argument("--width", type=int, default=64, help="features, a multiple of 8")
    cli.add_argument("--rank", type=int, default=8, help="of the adapters")
    cli.add_argument("--packed", help="the format of the frozen weights, such as nf4/64 (QLoRA)")
    cli.add_argument("--lr", type=float, default=1e-2, help="learning rate of the adapters")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
