"""Generated sequences equal those of the models themselves, on any number of ranks, however long each is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import PeerError, PlanError, TreeError
from fshard.generation import Sampling, harness, hugging_face, make_generate

WIDTH, WORDS = 8, 12
GREEDY = Sampling(0.0)


class Block(nn.Module):
    """Attention that appends to a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if cache is not None:
            k, v = (torch.cat((old, new), -2) for old, new in zip(cache, (k, v), strict=True))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.squeeze(1)), (k, v)


class Net(nn.Module):
    """Two blocks with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        x, kept = self.embed(tokens) + self.place(positions), []
        for block, old in zip(self.blocks, cache or (None, None), strict=True):
            x, new = block(x, mask, old)
            kept.append(new)
        return self.head(x), kept


def make(mesh: Any, stages: Any = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = fs.split(Net(), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"), stages=stages)

    def forward(params: Any, tokens: Tensor, cache: Any, places: Any) -> Any:
        return model.apply(params, tokens, places.positions, places.mask, cache)

    return plan, fs.init_state(plan, params=model.params), forward


PROMPTS = [[1, 2, 3, 4], [5], [6, 7], [8, 9, 10], [3, 3]]


def plain(prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    """What the model goes on with, without a cache and without shards."""
    torch.manual_seed(0)
    net, tokens = Net(), list(prompt)
    for _ in range(count):
        time = len(tokens)
        mask = torch.ones(time, time, dtype=torch.bool).tril()
        logits, _ = net(torch.tensor([tokens]), torch.arange(time)[None], mask)
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


def generated(mesh: Any, weights: str, **options: Any) -> list[list[int]]:
    plan, state, forward = make(mesh)
    mine = PROMPTS[mesh.rank :: mesh.size]
    found = make_generate(forward, plan, weights=weights)(state, mine, **options)
    assert [len(row) for row in found.tokens] == [len(row) for row in found.logprobs]
    return [row.tolist() for row in found.tokens]


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("weights", ["sharded", "whole"])
@pytest.mark.parametrize("eos", [None, 6])
def test_equal_to_the_model_itself(weights: str, eos: int | None) -> None:
    expected = [plain(prompt, 8, eos) for prompt in PROMPTS]
    assert generated(fs.make_mesh((1,), ("data",)), weights, max_new=8, sampling=GREEDY, eos=eos) == expected
    assert len({len(row) for row in expected}) > 1 or eos is None  # sequences end at different times

    def run() -> Any:
        return generated(fs.make_mesh((3,), ("data",)), weights, max_new=8, sampling=GREEDY, eos=eos)

    for rank, found in enumerate(fs.virtual_mesh((3,), ("data",)).run(run)):
        assert found == expected[rank::3]


def test_ranks_without_prompts_go_along() -> None:
    def run() -> Any:
        mesh = fs.make_mesh((2,), ("data",))
        plan, state, forward = make(mesh)
        mine = [] if mesh.rank else PROMPTS[:2]
        return [row.tolist() for row in fs.generate(state, forward, mine, max_new=5, sampling=GREEDY).tokens]

    assert fs.virtual_mesh((2,), ("data",)).run(run) == [[plain(prompt, 5) for prompt in PROMPTS[:2]], []]


@pytest.mark.parametrize("weights", ["sharded", "whole"])
def test_stages(weights: str) -> None:
    """The ranks of all stages have the tokens of their data rank."""

    def run() -> Any:
        mesh = fs.make_mesh((2, 2), ("stage", "data"))
        _, state, forward = make(mesh, fs.Stages("stage", leaves=[("place.*", 0)]))
        go_on = make_generate(forward, state.plan, weights=weights)
        mine = PROMPTS[state.plan.data_rank :: 2]
        return [[row.tolist() for row in go_on(state, mine, max_new=5, sampling=GREEDY).tokens] for _ in range(2)]

    want = [[plain(prompt, 5) for prompt in PROMPTS[rank::2]] for rank in range(2)]
    for rank, found in enumerate(fs.virtual_mesh((2, 2), ("stage", "data")).run(run)):
        assert found == [want[rank % 2]] * 2


@pytest.mark.long
def test_real_ranks(pool: Any) -> None:
    expected = [plain(prompt, 6, 6) for prompt in PROMPTS]
    for rank, found in enumerate(pool(2).run("tests.generation.test_generate:on_a_rank")):
        assert found == expected[rank::2]


def on_a_rank() -> Any:
    with fs.make_mesh((-1,), ("data",)) as mesh:
        return generated(mesh, "sharded", max_new=6, sampling=GREEDY, eos=6)


def test_draws_do_not_depend_on_ranks() -> None:
    options: Any = {"max_new": 6, "sampling": Sampling(0.9, top_k=5, seed=3)}

    def run() -> Any:
        mesh = fs.make_mesh((2,), ("data",))
        plan, state, forward = make(mesh)
        mine = PROMPTS[2 * mesh.rank : 2 * mesh.rank + 2]
        return [row.tolist() for row in fs.generate(state, forward, mine, **options).tokens]

    plan, state, forward = make(fs.make_mesh((1,), ("data",)))
    alone = [row.tolist() for row in fs.generate(state, forward, PROMPTS[:4], **options).tokens]
    assert sum(fs.virtual_mesh((2,), ("data",)).run(run), []) == alone
    other = fs.generate(state, forward, PROMPTS[:4], max_new=6, sampling=Sampling(0.9, top_k=5, seed=4)).tokens
    assert [row.tolist() for row in other] != alone


def test_draws_have_the_odds_of_the_model() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    for sampling, odds in (
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.7), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.5), [1, 0, 0, 0]),
        (Sampling(temperature=0.5), [0.6849, 0.2466, 0.0616, 0.0068]),
    ):
        tokens, logprobs = sampling(logits.expand(20_000, 4), 0, 0)
        counts = torch.bincount(tokens, minlength=4) / len(tokens)
        assert torch.allclose(counts, torch.tensor(odds).float(), atol=0.015), sampling
        assert torch.allclose(logprobs.exp(), torch.tensor(odds).float()[tokens], atol=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_of_the_wrong_length_is_told_on_all_ranks(ranks: int) -> None:
    def run() -> str:
        mesh = fs.make_mesh((ranks,), ("data",))
        plan, state, forward = make(mesh)

        def forgetful(params: Any, tokens: Tensor, cache: Any, places: Any) -> Any:
            logits, kept = forward(params, tokens, cache, places)
            return logits, [(k[..., :3, :], v) for k, v in kept]

        with pytest.raises((TreeError, PeerError)) as caught:
            fs.generate(state, forgetful, PROMPTS[:1], max_new=3)
        return str(caught.value)

    for text in fs.virtual_mesh((ranks,), ("data",)).run(run):
        assert "cache[0][0] has shape [1, 1, 3, 8]" in text and "Dim -2 must be 4" in text


@pytest.mark.parametrize(
    "returned, words",
    [
        (lambda tokens: torch.zeros(*tokens.shape, 7), r"returned a tensor of shape \[1, 2, 7\]: return \(logits"),
        (lambda tokens: (torch.zeros(len(tokens), 7), None), r"a tensor of shape \[1, 7\] and a cache.*\[1, 2, 'voc"),
        (lambda tokens: (None, None), "a pair of None and a cache"),
    ],
)
def test_what_a_forward_cannot_return(returned: Any, words: str) -> None:
    _, state, _ = make(fs.make_mesh((1,), ("data",)))
    with pytest.raises(TreeError, match=words):
        fs.generate(state, lambda params, tokens, cache, places: returned(tokens), [[1, 2]], max_new=2)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda go: go([[]], max_new=1), r"prompts\[0\] is torch.float32 \[0\]"),
        (lambda go: go([[1.5]], max_new=1), r"prompts\[0\] is torch.float32"),
        (lambda go: go("text", max_new=1), "prompts is 'text'"),
        (lambda go: go([[1]], max_new=1.5), "max_new is 1.5"),
        (lambda go: go([[1]], max_new=-1), "max_new=-1"),
        (lambda go: go([[1]], max_new=1, sampling=0.5), "sampling is 0.5"),
        (lambda go: Sampling(-1.0, 0, 2.0), r"temperature = -1.0.*\n.*top_k = 0.*\n.*top_p = 2.0"),
        (lambda go: make_generate(go.forward, go.plan, weights="all"), "weights='all' must be one of"),
    ],
)
def test_what_cannot_be(call: Any, words: str) -> None:
    plan, state, forward = make(fs.make_mesh((1,), ("data",)))
    step = make_generate(forward, plan)

    class Go:
        def __init__(self) -> None:
            self.forward, self.plan = forward, plan

        def __call__(self, *args: Any, **options: Any) -> Any:
            return step(state, *args, **options)

    with pytest.raises(PlanError, match=words):
        call(Go())


def test_whole_weights_need_units_that_read_them() -> None:
    mesh = fs.abstract_mesh((2, 2), ("data", "tp"))
    plan = fs.make_plan({"w": torch.ones(4, 4)}, mesh, [(".*", fs.P("tp", flat="data"))], batch=fs.P("data"))
    with pytest.raises(PlanError, match="slices along the axes tp"):
        make_generate(lambda *given: (given[1], ()), plan, weights="whole")


def llama(attention: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.long
def test_a_model_of_transformers_and_its_own_generate() -> None:
    net, prompts = llama(), [[5, 6, 7, 8], [9, 10], [11]]
    expected = []
    for prompt in prompts:
        given: Any = {"attention_mask": torch.ones(1, len(prompt)).long(), "max_new_tokens": 7, "do_sample": False}
        expected.append(net.generate(torch.tensor([prompt]), **given)[0].tolist()[len(prompt) :])

    def run() -> Any:
        mesh = fs.make_mesh((2,), ("data",))
        model = fs.split(net, units="auto")
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
        state = fs.init_state(plan, params=model.params)
        found = fs.generate(state, hugging_face(model), prompts[mesh.rank :: 2], max_new=7, sampling=GREEDY, eos=1)

        def inside(params: Any, tokens: Tensor) -> Tensor:
            count = 3 + 4 * mesh.rank  # ranks make unequal numbers of calls
            return model.apply(
                params, tokens, method="generate", attention_mask=torch.ones_like(tokens), max_new_tokens=count,
                do_sample=False,
            )  # fmt: skip

        step = fs.make_eval_step(inside, plan)
        own = [step(state, torch.tensor([prompts[mesh.rank]]))[0].tolist() for _ in range(2)]
        return [row.tolist() for row in found.tokens], own

    with pytest.warns(UserWarning, match="ranks called other units"):
        results = fs.virtual_mesh((2,), ("data",)).run(run)
    for rank, (found, own) in enumerate(results):
        assert found == expected[rank::2]
        assert own == 2 * [prompts[rank] + expected[rank][: 3 + 4 * rank]]


@pytest.mark.long
def test_a_model_whose_sequence_is_cut_over_ranks() -> None:
    """It reads no cache. A model with other attention goes on from its state."""
    pytest.importorskip("transformers")
    fs.parallel.register_attention()
    cut, whole = (fs.split(llama(name), units="auto") for name in ("fshard_ring", "sdpa"))
    with pytest.raises(PlanError, match="'fshard_ring' reads no cache: give another model, fs.split of LlamaForCaus"):
        hugging_face(cut)

    def tokens(model: Any, ranks: Any, axes: tuple[str, ...]) -> Any:
        plan = fs.make_plan(model, ranks, [(".*", fs.fsdp(axes))], batch=fs.P(*axes))
        state = fs.init_state(plan, params=model.params)
        return fs.generate(state, hugging_face(whole), [[5, 6, 7]], max_new=3).tokens[0].tolist()

    one, two = fs.virtual_mesh((1,), ("data",)), fs.virtual_mesh((1, 2), ("data", "cp"))
    expected = one.run(lambda: tokens(whole, one, ("data",)))
    assert two.run(lambda: tokens(cut, two, ("data", "cp"))) == 2 * expected


def nll(model: Any) -> Any:
    """The negative log-likelihood of each next word."""

    def loss_of(params: Any, tokens: Tensor) -> Any:
        time = tokens.shape[1] - 1
        mask = torch.ones(time, time, dtype=torch.bool).tril()
        logits, _ = model(params, tokens[:, :-1], torch.arange(time).expand(len(tokens), time), mask)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return fs.Mean(losses, tokens[:, 1:].numel())

    return loss_of


def test_perplexity_is_exact_over_unequal_ranks_and_batches() -> None:
    data = torch.randint(WORDS, (9, 6), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = fs.split(Net(), units=("blocks.*",))
    whole = nll(model.apply)(model.params, data)
    loss = (whole.total / whole.count).item()

    def run() -> Any:
        mesh = fs.make_mesh((2,), ("data",))
        plan, state, _ = make(mesh)
        mine = [data[:4], data[4:6], data[6:7]] if mesh.rank else [data[7:]]
        return fs.perplexity(state, nll(model.apply), iter(mine))

    for found in fs.virtual_mesh((2,), ("data",)).run(run):
        assert found.loss == pytest.approx(loss, rel=1e-6) and found.batches == 3
        assert found.perplexity == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-5)
    plan, state, _ = make(fs.make_mesh((1,), ("data",)))
    with pytest.raises(fs.errors.BatchError, match="this rank has no batch"):
        fs.perplexity(state, nll(model.apply), [])
    with pytest.raises(fs.errors.LossError, match=r"return fs.Mean\("):
        fs.perplexity(state, lambda params, x: x.float().mean(), [data])


def test_the_harness_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from fshard.tracking import tracker

    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    plan, state, forward = make(fs.make_mesh((1,), ("data",)))
    with pytest.raises(ImportError, match=r"fshard\[harness\]"):
        harness(state, forward, encode=list, decode=str, eos=0)
