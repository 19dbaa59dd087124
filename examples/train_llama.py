"""Pretrain a small Llama: torchrun --nproc-per-node 2 examples/train_llama.py --out runs/llama (again: it goes on)."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM  # pip install "fshard[examples]"

import fshard as fs

cli = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
cli.add_argument("--out", type=Path, default=Path("runs/llama"), help="folder of checkpoints, metrics and the model")
for name, value, text in (
    ("steps", 300, "train steps"), ("batch", 32, "rows of a step, over all ranks"), ("context", 128, "bytes in a row"),
    ("accumulate", 2, "microbatches of a step"), ("width", 128, "features"), ("depth", 4, "layers"),
    ("every", 100, "steps between two checkpoints and evaluations"),
):  # fmt: skip
    cli.add_argument(f"--{name}", type=int, default=value, help=text)
args = cli.parse_args()
text = torch.frombuffer(bytearray("".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8)
rows = text.unfold(0, args.context, args.context)  # bytes are tokens; the last rows are held out
config = LlamaConfig(vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_attention_heads=4,
                     num_hidden_layers=args.depth, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)  # fmt: skip

with fs.make_mesh((-1,), ("data",)) as mesh, fs.Checkpointer(args.out / "checkpoints", every=args.every) as saved:
    with fs.empty_weights():  # no rank ever holds the whole model
        model = fs.split(LlamaForCausalLM(config), units="auto")
    bf16 = fs.Precision(compute=torch.bfloat16)  # parameters and sums stay float32
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), precision=bf16)
    rate = fs.optim.schedules.warmup_cosine(3e-3, warmup=args.steps // 10, total=args.steps)
    opt = fs.optim.ema(fs.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1, decay=fs.optim.matrices), 0.98)

    def start():
        return fs.init_state(plan, opt, init=[(r".*norm\.weight", fs.init.ones()), (".*", fs.init.normal(0.03))])

    def loss_fn(params, batch):
        logits = model.apply(params, input_ids=batch.long(), use_cache=False).logits[:, :-1].float().flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, batch[:, 1:].long().flatten(), reduction="sum")
        return fs.Mean(losses, batch[:, 1:].numel())

    step = fs.make_train_step(loss_fn, opt, plan, clip_norm=1.0, accumulate=args.accumulate)
    loader = fs.data.Loader(rows[:-64], plan, batch=args.batch)
    trackers = [fs.trackers.JsonLines(args.out / "metrics.jsonl"), fs.trackers.Live(args.steps)]
    with fs.track(trackers, step, peak="measured", config=vars(args)) as track:
        for state, _ in fs.train_loop(step, start, loader, steps=args.steps, checkpoints=saved, track=track):
            if state.step % args.every == 0 or state.step == args.steps:
                tests = fs.data.Loader(rows[-64:], plan, batch=32, shuffle=False, epochs=1)
                track(state.step, {"held out": fs.perplexity(fs.averaged(state), loss_fn, tests)})
    state = fs.averaged(saved.restore(plan, opt))
    fs.io.save_hf(state, args.out / "model", config=config, overwrite=True)
    read, prompt = fs.generation.hugging_face(model), list(b"The statement ")
    made = fs.generate(state, read, [prompt], max_new=100, sampling=fs.generation.Sampling(0.7))
    if mesh.rank == 0:
        print(bytes(prompt + made.tokens[0].tolist()).decode(errors="replace"))
