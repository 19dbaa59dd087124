"""The script that a config becomes, with the lines of all objectives and sources."""

TEMPLATE = '''
CONFIG = $config
"""The values of the config, for trackers."""


@functools.cache
def make_tokens():
    """Return the tokenizer."""
    return $tokens


def read_data():
    """Return rows to train on, and rows that are held out."""
    records, tokens = $records, make_tokens()
?windows     text = torch.cat([tokens(text) for text in field_values(records, $text)])
?windows     train, test = held_out(text, $share)
?windows     return windows(train, $length, 1), windows(test, $length, $length)
?packed     documents = [tokens(text, end=$end) for text in field_values(records, $text)]
?packed     return [fs.data.Packed(part, $length, split=$split) for part in held_out(documents, $share)]
?sft|dpo     prompts = [tokens(text) for text in field_values(records, $prompt)]
?sft     answers = [tokens(text, end=True) for text in field_values(records, $answer)]
?sft     documents = [torch.cat(both) for both in zip(prompts, answers)]
?sft     marks = [torch.arange(len(both)) >= len(prompt) for prompt, both in zip(prompts, documents)]
?sft     parts = zip(held_out(documents, $share), held_out(marks, $share))
?sft     return [Answers(*[fs.data.Packed(part, $length, split=$split) for part in both]) for both in parts]
?dpo     better = [tokens(text, end=True) for text in field_values(records, $chosen)]
?dpo     worse = [tokens(text, end=True) for text in field_values(records, $rejected)]
?dpo     return held_out([padded(*three, $length) for three in zip(prompts, better, worse)], $share)


def make_model():
    """Return the model. Its parameters take no memory."""
?file     make = from_file($source)
?hf     config = hugging_face_config($source, $options)
?hf     check_vocabulary(config, make_tokens().size)
    with fs.empty_weights():
?file         model = fs.split(make(**$options), units=$units)
?hf         model = fs.split(hugging_face_model(config).train(), units=$units)
?lora     model = fs.lora.wrap(model, $targets, rank=$rank, alpha=$alpha, seed=$seed)
    return model


def make_plan(model, mesh):
    """Say which rank holds what."""
    return fs.make_plan(model, mesh, $rules, batch=fs.P($batch_axes), precision=$precision)


?dpo def margin_of(model):
?dpo     """Return the function of the log odds of better answers against worse ones."""
?dpo
?dpo     def margin(params, batch):
?dpo         tokens, marks = batch["tokens"].flatten(0, 1), batch["marks"].flatten(0, 1)
?dpo         logits = $logits
?dpo         better, worse = answer_scores(logits, tokens, marks).unflatten(0, (-1, 2)).unbind(1)
?dpo         return better - worse
?dpo
?dpo     return margin
?dpo
?dpo
def loss_of(model):
    """Return the loss function."""
?dpo     margin = margin_of(model)

?alone     def alone(batch):  # documents see themselves
?alone         mask = fs.data.document_mask(batch["documents"])
?alone         return {"attention_mask": mask, "position_ids": batch["positions"]}

    def loss_fn(params, batch):
?dpo         return -functional.logsigmoid($beta * (margin(params, batch) - batch["before"])).mean()
?windows         tokens, targets = batch[:, :-1], batch[:, 1:].flatten()
?windows         logits = $logits
?windows         return functional.cross_entropy(logits.float().flatten(0, 1), targets)$nats
?packed|sft         tokens, targets = batch["tokens"], batch["targets"].flatten()
?packed|sft         logits = $logits
?packed|sft         losses = functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
?packed|sft         return fs.Mean(losses$nats, (targets >= 0).sum())

    return loss_fn


def make_step(model, plan):
    """Make the train step, with its optimizer."""
    rate = $rate
    opt = $optimizer
    return fs.make_train_step(loss_of(model), opt, plan, $step)


def train(mesh):
    """Train on these ranks, and return the last state."""
    model, (rows, tests) = make_model(), read_data()
    plan = make_plan(model, mesh)
    step = make_step(model, plan)

    def start(opt=step.opt):
        return $start

?dpo     reference, judge = start(None), fs.make_eval_step(margin_of(model), plan)
?dpo
?windows|dpo     def batch_of(rows, places):  # this rank's part of a global batch
?windows         return plan.local_batch(rows[places]).long().to(mesh.device)
?dpo         batch = plan.local_batch(on_device([rows[i] for i in places], mesh.device))
?dpo         return {**batch, "before": judge(reference, batch)}
?packed|sft     def loader(rows, **options):
?packed|sft         collate = functools.partial(on_device, device=mesh.device)
?packed|sft         return fs.data.Loader(rows, plan, batch=$batch, seed=$seed, collate=collate, **options)

?windows     def batches(n):  # of the seed and the step alone
?windows         return batch_of(rows, random.Random(f"$seed {n}").choices(range(len(rows)), k=$batch))
?windows
?dpo     order = fs.data.Order(len(rows), batch=$batch, seed=$seed)
?held&windows|held&dpo     evaluated = fs.make_eval_step(loss_of(model), plan)
?held
?held     def evaluate(state):
?held&windows|held&dpo         parts = full_batches(len(tests), $batch, $most)
?held&windows|held&dpo         losses = [evaluated($judged, batch_of(tests, part)).item() for part in parts]
?held&windows|held&dpo         return {"held out": sum(losses) / len(losses)}
?held&packed|held&sft         parts = itertools.islice(loader(tests, shuffle=False, epochs=1, partial="keep"), $most)
?held&packed|held&sft         return {"held out": fs.perplexity($judged, loss_of(model), parts).loss}

    state, trackers = None, [$trackers]
    checkpoints = $saved
    with checkpoints as saved, fs.track(trackers, step, config=CONFIG$elements) as track:
        for state, _ in fs.train_loop(
            step, start, $batches, steps=$steps, checkpoints=saved, track=track, $evaluate
        ):
            pass
        return saved.restore(plan, step.opt) if state is None else state  # a run that was over yields no state


if __name__ == "__main__":
    with fs.make_mesh($shape, $axes) as mesh:
        train(mesh)
'''
"""The script. A line after ``?a&b|c`` is for configs of both a and b, or of c."""
