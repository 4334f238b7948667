"""The token file: what it holds, that it is reused, and that none is left half-written."""

import json
import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from lightning_5d.data import corpus as corpus_file
from lightning_5d.data import tokens as tokens_file
from lightning_5d.data import unigram_entropy_nats
from lightning_5d.data.corpus import Corpus
from lightning_5d.data.tokenizer import END_OF_TEXT, end_of_text_id, load_tokenizer, train_tokenizer
from lightning_5d.data.tokens import TokenFile, build_token_file, cache_folder

TEXTS = ["the cat sat on the mat\n" * 20, "ünïcödé 漢字 🙂 and\ttabs", f"a text that spells {END_OF_TEXT} out"]


@pytest.fixture
def corpus(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return Corpus(source)


def build(corpus, cache, tokenizer=None, vocab_size=300, end_of_text=None):
    return build_token_file(
        cache_folder(cache, corpus, tokenizer, vocab_size, end_of_text), corpus, tokenizer, vocab_size, end_of_text
    )


def test_documents_come_back_and_boundaries_are_kept(corpus, tmp_path):
    file = build(corpus, tmp_path / "cache")
    starts, end = file.document_starts, file.meta.end_of_text
    assert (file.tokens.dtype, file.meta.num_tokens) == (np.uint16, len(file.tokens))
    assert (starts[0], starts[-1], len(starts) - 1, file.meta.num_documents) == (0, len(file.tokens), 3, 3)
    for text, start, stop in zip(TEXTS, starts[:-1], starts[1:], strict=True):
        document = file.tokens[start:stop]
        assert document[-1] == end
        assert end not in document[:-1]
        assert file.tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False) == text
    assert file.meta.vocab_size == 300
    assert file.tokens.max() < 300


def test_a_document_in_pieces_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_file, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(tokens_file, "_ENCODE_CHARACTERS", 2500)
    (tmp_path / "long.txt").write_text("one line of it\n" * 500)
    assert len(list(Corpus(tmp_path / "long.txt").pieces())) == 8
    file = build(Corpus(tmp_path / "long.txt"), tmp_path / "cache")
    assert file.meta.num_documents == 1
    assert np.flatnonzero(file.tokens == file.meta.end_of_text).tolist() == [file.meta.num_tokens - 1]


def test_built_once_and_reused_until_something_changes(corpus, tmp_path, monkeypatch):
    cache, calls, real = tmp_path / "cache", [], tokens_file._build
    monkeypatch.setattr(tokens_file, "_build", lambda *args: calls.append(1) or real(*args))
    first, second = build(corpus, cache), build(corpus, cache)
    assert (len(calls), first.folder, first.meta) == (1, second.folder, second.meta)
    assert build(corpus, cache, vocab_size=280).folder != first.folder
    (corpus.path / "more.txt").write_text("more text")
    third = build(Corpus(corpus.path), cache)
    assert third.folder != first.folder
    assert third.meta.tokens_hash != first.meta.tokens_hash
    assert len(calls) == 3


def test_the_same_text_elsewhere_has_the_same_hash(corpus, tmp_path):
    other = tmp_path / "elsewhere.jsonl"
    other.write_bytes((corpus.path / "texts.jsonl").read_bytes())
    assert build(corpus, tmp_path / "a").meta.tokens_hash == build(Corpus(other), tmp_path / "b").meta.tokens_hash


def test_a_given_tokenizer(corpus, tmp_path):
    trained = train_tokenizer(corpus.pieces(), 270)
    trained.save(str(tmp_path / "tokenizer.json"))
    by_file = build(corpus, tmp_path / "cache", tokenizer=tmp_path / "tokenizer.json")
    assert by_file.meta.vocab_size == 270
    assert build(corpus, tmp_path / "cache", tokenizer=tmp_path).folder == by_file.folder  # the folder that holds it
    named = build(corpus, tmp_path / "cache", tokenizer=tmp_path, end_of_text="a")
    assert named.meta.end_of_text == trained.token_to_id("a")


def test_large_vocabularies_take_four_bytes(corpus, tmp_path):
    vocabulary = {f"w{i}": i for i in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w69999"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = build(corpus, tmp_path / "cache", tokenizer=tmp_path, end_of_text="w3")
    assert file.meta.dtype == "uint32"
    assert file.tokens.max() == 69_999


def test_faulty_tokenizers(corpus, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        build(corpus, tmp_path / "cache", tokenizer=tmp_path)
    assert entries(tmp_path / "cache") == []
    with pytest.raises(ValueError, match=r"no token .* name one of its tokens by end_of_text="):
        end_of_text_id(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(corpus.pieces(), 256)


def entries(cache):
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock"))


def test_an_error_leaves_nothing_behind(corpus, tmp_path):
    with (corpus.path / "texts.jsonl").open("a") as stream:
        stream.write("{\n")
    with pytest.raises(ValueError, match="line 4: not JSON"):
        build(Corpus(corpus.path), tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def _build_slowly(corpus, cache):
    real = tokens_file._write_tokens

    def slow(stream, *args):
        stream.write(b"half")
        stream.flush()
        time.sleep(60)
        return real(stream, *args)

    tokens_file._write_tokens = slow
    build(corpus, cache)


def test_a_killed_build_is_never_taken_for_a_whole_one(corpus, tmp_path):
    cache = tmp_path / "cache"
    process = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(corpus, cache))
    process.start()
    deadline = time.monotonic() + 30
    while not list(cache.glob(".*.building/tokens.bin")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert [name for name in entries(cache) if not name.startswith(".")] == []
    file = build(corpus, cache)
    assert entries(cache) == [file.folder.name]  # and what the killed one left is gone
    assert len(file.tokens) == file.meta.num_tokens


def _build_and_count(corpus, cache, start, queue):
    real, built = tokens_file._build, []

    def counted(*args):
        built.append(1)
        time.sleep(0.3)  # the others come while this one builds
        real(*args)

    tokens_file._build = counted
    start.wait()
    build(corpus, cache)
    queue.put(len(built))


def test_processes_that_want_the_same_file_build_it_once(corpus, tmp_path):
    context = multiprocessing.get_context("fork")
    queue, start = context.Queue(), context.Barrier(3)
    processes = [context.Process(target=_build_and_count, args=(corpus, tmp_path / "cache", start, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(queue.get(timeout=30) for _ in processes) == [0, 0, 1]
    for process in processes:
        process.join()


def test_workers_get_a_path_and_not_the_tokens(corpus, tmp_path):
    file = build(corpus, tmp_path / "cache")
    file.tokens, file.document_starts  # noqa: B018
    sent = pickle.loads(pickle.dumps(file))
    assert isinstance(sent, TokenFile)
    assert set(vars(sent)) == {"folder", "meta"}
    assert np.array_equal(sent.tokens, file.tokens)


def test_unigram_entropy():
    assert unigram_entropy_nats(np.arange(8)) == pytest.approx(np.log(8))
    assert unigram_entropy_nats(np.array([[3, 3], [3, 3]])) == 0.0
    assert unigram_entropy_nats(np.array([0, 0, 0, 1])) == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy_nats(np.array([]))
