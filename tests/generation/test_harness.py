"""The model that lm-evaluation-harness gets: its answers are those of plain PyTorch, and its base class takes it."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.generation import harness
from tests.generation.test_generate import WORDS, Net, make, plain

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
LETTERS = "_abcdefghijk"
assert len(LETTERS) == WORDS


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode(tokens: Any) -> str:
    return "".join(LETTERS[token] for token in tokens)


def log_odds(context: str, continuation: str) -> tuple[float, bool]:
    """By plain PyTorch, on the whole sequence."""
    torch.manual_seed(0)
    net, tokens = Net(), torch.tensor([encode(context) + encode(continuation)])
    time = tokens.shape[1] - 1
    mask = torch.ones(time, time, dtype=torch.bool).tril()
    odds = net(tokens[:, :-1], torch.arange(time)[None], mask)[0].log_softmax(-1)[0, -len(continuation) :]
    wanted = tokens[0, -len(continuation) :]
    return odds.gather(-1, wanted[:, None]).sum().item(), bool((odds.argmax(-1) == wanted).all())


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    return [instance(kind, {}, given, 0) for given in arguments]


def on_ranks(ranks: int, body: Any) -> list[Any]:
    def run() -> Any:
        plan, state, forward = make(fs.make_mesh((ranks,), ("data",)))
        return body(harness(state, forward, encode=encode, decode=decode, eos=0, length=16, batch=2))

    return fs.virtual_mesh((ranks,), ("data",)).run(run)


@pytest.mark.parametrize("ranks", [1, 3])
def test_log_likelihoods(ranks: int) -> None:
    pytest.importorskip("lm_eval")
    pairs = [("ab", "cde"), ("k", "a"), ("abcdef", "gh"), ("bbb", "jjj"), ("a", "ij")]
    pairs.append(("cd", decode(plain(encode("cd"), 3))))  # the likeliest
    expected = [log_odds(*pair) for pair in pairs]
    for found in on_ranks(ranks, lambda lm: lm.loglikelihood(requests("loglikelihood", *pairs))):
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected] and expected[-1][1]
        assert [odds for odds, _ in found] == pytest.approx([odds for odds, _ in expected], rel=1e-4)


def test_whole_texts_and_what_follows() -> None:
    lm_eval = pytest.importorskip("lm_eval")
    texts = ["abc", "kjihgfedcba"]
    rolling = on_ranks(
        2, lambda lm: lm.loglikelihood_rolling(requests("loglikelihood_rolling", *[(t,) for t in texts]))
    )
    for found in rolling:
        assert found == pytest.approx([log_odds("_", text)[0] for text in texts], rel=1e-4)
    long = "abcdefghijk" * 3  # longer than the model reads
    (found,) = on_ranks(1, lambda lm: lm.loglikelihood_rolling(requests("loglikelihood_rolling", (long,))))
    assert len(found) == 1 and found[0] < rolling[0][0]
    options: dict[str, Any] = {"until": ["\n"], "max_gen_toks": 5}
    prompts = [("ab", options), ("c", options), ("abc", {**options, "until": decode(plain(encode("abc"), 5, 0))[1]})]
    expected = [decode([t for t in plain(encode(p), 5, 0) if t]) for p, _ in prompts]
    expected[2] = expected[2].partition(prompts[2][1]["until"])[0]
    for texts in on_ranks(2, lambda lm: lm.generate_until(requests("generate_until", *prompts))):
        assert texts == expected
    (kind,) = on_ranks(1, type)
    assert issubclass(kind, lm_eval.api.model.LM)
