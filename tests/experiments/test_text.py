import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.experiments.text import TextBatches, load_corpus, read_files, read_speeches, validation_batches

SENTENCES = [f"Sentence number {i} speaks of ships, sails and the weather. " * 20 for i in range(40)]


def test_held_out_documents_share_no_text_with_training():
    documents = [f"document-{i} " * 50 for i in range(40)]
    corpus = load_corpus(documents)
    train, held_out = (bytes(ids.tolist()).decode() for ids in (corpus.train, corpus.validation))
    in_train = {i for i in range(40) if f"document-{i} " in train}
    in_held_out = {i for i in range(40) if f"document-{i} " in held_out}
    assert in_train | in_held_out == set(range(40))
    assert not in_train & in_held_out
    assert len(in_held_out) == 2


def test_a_single_file_gives_its_end_to_validation():
    corpus = load_corpus(["a" * 9500 + "b" * 500])
    assert set(corpus.validation.tolist()) == {ord("b")}
    assert len(corpus.train) == 9500


def test_bytes_survive_letters_that_take_several_of_them():
    corpus = load_corpus(["Größe, 船, ⛵ " * 400])
    assert bytes(corpus.train.tolist()).decode("utf-8", errors="ignore").startswith("Größe, 船, ⛵")
    assert corpus.bytes_per_token == 1.0


def test_a_trained_tokenizer_reads_back_what_it_wrote_and_counts_bytes_per_token():
    corpus = load_corpus(SENTENCES, tokenizer="bpe", vocab_size=400)
    text = corpus.tokenizer.decode(corpus.validation)
    assert "speaks of ships, sails and the weather." in text
    assert corpus.bytes_per_token == pytest.approx(len(text.encode()) / len(corpus.validation))
    assert corpus.vocab_size <= 400


def test_batches_depend_on_the_seed_and_the_index_alone():
    tokens = torch.arange(1000)
    one, same, other = (TextBatches(tokens, 4, 16, seed) for seed in (1, 1, 2))
    assert torch.equal(one[7], same[7])
    assert not torch.equal(one[7], one[8])
    assert not torch.equal(one[7], other[7])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one[9]
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_windows_do_not_overlap_and_cover_the_text_evenly():
    tokens = torch.arange(1000)
    windows = torch.cat(list(validation_batches(tokens, batch=3, sequence=10, num_sequences=50)))
    assert windows.shape == (50, 10)
    assert len(set(windows.flatten().tolist())) == 500
    assert windows.max() >= 980


@pytest.mark.parametrize("text", ["", "  \n "])
def test_empty_text_is_refused(tmp_path, text):
    (tmp_path / "empty.txt").write_text(text)
    with pytest.raises(ConfigError, match=r"data=.*there is no text in it\. Name files that hold text\."):
        read_files([tmp_path / "empty.txt"])


def test_a_missing_file_and_a_binary_one_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.txt.*cannot be read"):
        read_files([tmp_path / "nowhere.txt"])
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.txt.*not text in UTF-8"):
        read_files([tmp_path / "binary.txt"])


def test_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ConfigError, match="needs more text"):
        load_corpus(["too short"], sequence=64)


def test_a_folder_stands_for_its_text_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.txt").write_text("first")
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert sorted(read_files([tmp_path])) == ["first", "second"]


def test_the_built_in_text_is_the_speeches_and_nothing_else():
    speeches = read_speeches()
    assert len(speeches) > 200
    assert all(len(s) > 1000 for s in speeches)
    assert speeches[0].startswith("Fellow-Citizens of the Senate and House of Representatives")
