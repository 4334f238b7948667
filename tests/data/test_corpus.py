"""Reading text: what is read, and that each fault names its file and line."""

import builtins
import json

import pytest

from lightning_5d.data import corpus as corpus_file
from lightning_5d.data.corpus import Corpus


def documents(path, **options):
    found, parts = [], []
    for piece in Corpus(path, **options).pieces():
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def test_builtin_corpus_is_python_documentation():
    texts = documents(None)
    assert len(texts) > 50
    assert sum(map(len, texts)) > 300_000
    assert any("list comprehension" in text.lower() or "comprehension" in text for text in texts)


def test_folder_of_every_kind(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.txt").write_text("\ufeffplain\r\ntext", encoding="utf-8")  # a byte order mark is not text
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.MD").write_text("# marked")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\nlines", "id": 3}\n')
    parquet.write_table(pyarrow.table({"text": ["three", "four"], "n": [1, 2]}), tmp_path / "d.parquet")
    (tmp_path / "e.py").write_text("print('é')\n", encoding="utf-8")
    (tmp_path / "ignored.bin").write_bytes(b"\xff\x00")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "f.txt").write_text("not this")
    assert documents(tmp_path) == ["plain\r\ntext", "one", "two\nlines", "three", "four", "print('é')\n", "# marked"]


def test_long_text_is_read_in_pieces_of_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_file, "_PIECE_BYTES", 1200)
    text = "".join(f"line {i} of a long file\n" for i in range(80))
    (tmp_path / "long.txt").write_text(text)
    corpus = Corpus(tmp_path / "long.txt")
    pieces = list(corpus.pieces())
    assert len(pieces) == 2
    assert pieces[0].text.endswith("\n")
    assert [piece.ends_document for piece in pieces] == [False, True]
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.num_bytes for piece in pieces) == corpus.num_bytes


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x", "text": "y"}\n')
    assert documents(tmp_path / "a.jsonl", field="content") == ["x"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nfine\nbad \xff here\n", r"a\.txt, line 3: not UTF-8 \(byte 0xff at column 5\)"),
        ("a.txt", b"", r"a\.txt: holds no text"),
        ("a.md", b" \n\n", r"a\.md: holds no text"),
        ("a.jsonl", b"", r"a\.jsonl: holds no text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n["x"]\n', r"a\.jsonl, line 2: expected an object with the key 'text', got list"),
        ("a.jsonl", b'\n{"body": "x"}\n', r"a\.jsonl, line 2: no key 'text'; there are: 'body'"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl, line 1: 'text' must be text, got int"),
        ("a.jsonl", b'{"text": "x"}\n\x80\n', r"a\.jsonl, line 2: not UTF-8"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet: not a readable \.parquet file"),
        ("a.parquet", b"", r"a\.parquet: not a readable \.parquet file"),
        ("a.csv", b"x", r"a\.csv: files of kind '\.csv' cannot be read\. Supported: \.txt"),
    ],
)
def test_faults_name_file_and_line(tmp_path, name, content, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents(tmp_path / name)


def test_faults_of_parquet_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), file)
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'text'; there are: 'body', 'n'"):
        documents(file)
    parquet.write_table(pyarrow.table({"text": ["x", None]}), file)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: 'text' must be text, got NoneType"):
        documents(file)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'lightning-5d\[parquet\]'"):
        documents(tmp_path / "a.parquet")


def test_no_such_path_and_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        Corpus(tmp_path / "nowhere")
    (tmp_path / "x.csv").write_text("x")
    with pytest.raises(ValueError, match=r"holds no file of a supported kind \(\.txt"):
        Corpus(tmp_path)


def test_fingerprint_changes_with_a_file_and_with_the_field(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}')
    before = Corpus(tmp_path).fingerprint()
    assert json.loads(json.dumps(before)) is not None
    assert Corpus(tmp_path).fingerprint() == before
    assert Corpus(tmp_path, field="body").fingerprint() != before
    file.write_text('{"text": "other"}')
    assert Corpus(tmp_path).fingerprint() != before
