"""Text corpora as TFDS builders, written to array_record and read back without TensorFlow.

`load("python_docs")`, `load("quijote")`, `load("text", path="notes/*.txt")`, or `load("tfds:NAME")` for any TFDS text
dataset that is already prepared as array_record or can be prepared without TensorFlow and Beam. TFDS stores prepared
datasets in the folder TFDS_DATA_DIR, by default `~/tensorflow_datasets`.
"""

import contextlib
import fcntl
import glob
import hashlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader

from attnlab.errors import UserError

GUTENBERG_QUIJOTE = "https://www.gutenberg.org/cache/epub/2000/pg2000.txt"
RETRIES = 4  # download attempts
CHECK_NETWORK = "check the network, or prepare it elsewhere as array_record"


class Corpus(NamedTuple):
    """A text, split into a training and a validation part.

    Attributes:
      name: the name it was loaded by.
      train: training text.
      validation: validation text, disjoint from `train`.
      sha256: digest of the UTF-8 bytes of both, concatenated.
    """

    name: str
    train: str
    validation: str
    sha256: str

    @property
    def text(self) -> str:
        """Both parts; the source of a character vocabulary."""
        return self.train + self.validation


def load(name: str, *, path: str = "", feature: str = "", validation_fraction: float = 0.1) -> Corpus:
    """Read a corpus, preparing it first if necessary.

    Args:
      name: "python_docs", "quijote", "text" or "tfds:NAME" (also "tfds:NAME/CONFIG").
      path: for "text", a file or a glob; files are concatenated in name order.
      feature: for "tfds:NAME", the text feature to read; may be empty if there is only one.
      validation_fraction: fraction of the characters, at the end, to hold out; a TFDS dataset with a validation or test
        split uses that split instead.

    Raises:
      UserError: an unknown name, or a path or dataset that cannot be read.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"data.validation_fraction = {validation_fraction}: expected a fraction between 0 and 1")
    if name.startswith("tfds:"):
        return _load_tfds(name, feature, validation_fraction)
    builders = {"python_docs": PythonDocs, "quijote": Quijote, "text": TextFiles}
    if name not in builders:
        raise UserError(f"data.name = {name!r} is unknown: use one of {', '.join(builders)}, or tfds:NAME")
    builder = _build(builders[name], **({"config": _text_config(path)} if name == "text" else {}))
    text = "".join(_documents(_prepare(builder, name), name, "train", "text"))
    if name == "text" and text != "".join(builder.builder_config.texts):
        raise UserError(f"{builder.data_dir} no longer contains the text that was written there: remove that folder")
    if not text:
        raise UserError(f"{path or name} is empty: give a text with at least a few thousand characters")
    cut = int(len(text) * (1 - validation_fraction))
    return _corpus(name, text[:cut], text[cut:])


class _TextBuilder(tfds.core.GeneratorBasedBuilder):
    """A builder with the single split `train`, whose examples concatenate to the text."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(dl_manager)}

    def _generate_examples(self, dl_manager):
        for key, piece in enumerate(self._pieces(dl_manager)):
            yield key, {"text": piece}

    def _pieces(self, dl_manager):
        raise TypeError(f"{type(self).__name__} does not define _pieces(dl_manager): implement it in the subclass")


class PythonDocs(_TextBuilder):
    """The language reference that is part of every CPython (pydoc_data.topics), topic by topic.

    The text differs between Python versions, so the dataset's name contains the version.
    """

    name = "attnlab_python_docs"
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name="python{}.{}.{}".format(*sys.version_info))]

    def _pieces(self, dl_manager):
        from pydoc_data.topics import topics

        for _, text in sorted(topics.items()):
            yield text.strip() + "\n\n\n"


class Quijote(_TextBuilder):
    """Cervantes, El ingenioso hidalgo don Quijote de la Mancha (1605, 1615): book 2000 of Project Gutenberg.

    A UTF-8 text at `downloads/manual/quijote.txt`, if there is one, is read instead of downloading.
    """

    name = "attnlab_quijote"

    def _pieces(self, dl_manager):
        by_hand = Path(os.fspath(dl_manager.download_dir)) / "manual" / "quijote.txt"
        path = by_hand if by_hand.exists() else Path(os.fspath(dl_manager.download(GUTENBERG_QUIJOTE)))
        yield _between_gutenberg_marks(_read(path))


class TextFiles(_TextBuilder):
    """The user's text files; one dataset per content."""

    name = "attnlab_text"

    def _pieces(self, dl_manager):
        yield from self.builder_config.texts


class _TextConfig(tfds.core.BuilderConfig):
    """A config named by a digest of the content.

    Attributes:
      texts: one per file.
    """

    texts: Sequence[str] = ()


def _text_config(path: str) -> _TextConfig:
    if not path:
        raise UserError("data.name = 'text' needs a file: --config.data.path=FILE, or a glob such as 'notes/*.txt'")
    expanded = os.path.expanduser(path)
    files = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
    if not files:
        raise UserError(f"data.path = {path!r}: no such file, and no file matches it as a glob")
    texts = [_read(Path(file)) for file in files]
    # Add a final newline where one is missing, so that files do not run into each other.
    texts = [t if t.endswith("\n") or i == len(texts) - 1 else t + "\n" for i, t in enumerate(texts)]
    if not any(texts):
        raise UserError(f"data.path = {path!r} is empty: give a text with at least a few thousand characters")
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    config = _TextConfig(name=digest[:32])
    config.texts = texts
    return config


def _read(path: Path) -> str:
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file, or a glob such as '{path}/*.txt'")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}): convert it first, "
            f"e.g. iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _between_gutenberg_marks(text: str) -> str:
    for mark, side in (("*** START OF", 1), ("*** END OF", 0)):
        if mark in text:
            text = text.split(mark, 1)[side]
            text = text.split("\n", 1)[1] if side else text
    return text.replace("\r\n", "\n").strip() + "\n"


def _load_tfds(name, feature, validation_fraction) -> Corpus:
    """A TFDS text dataset, its documents joined by blank lines."""
    with _one_line_errors(name):
        builder = _build_by_name(name)
    builder = _prepare(builder, name)
    texts = [key for key, kind in builder.info.features.items() if isinstance(kind, tfds.features.Text)]
    if not feature and "text" in texts:
        feature = "text"
    if not feature and len(texts) == 1:
        feature = texts[0]
    if feature not in texts:
        raise UserError(
            f"{name} has the text features {', '.join(texts) or '(none)'}: choose one with --config.data.feature=…"
        )
    splits = list(builder.info.splits)
    train = "train" if "train" in splits else splits[0]
    held_out = next((split for split in ("validation", "test") if split in splits and split != train), None)
    text = "\n\n".join(_documents(builder, name, train, feature))
    if held_out:
        return _corpus(name, text, "\n\n" + "\n\n".join(_documents(builder, name, held_out, feature)))
    cut = int(len(text) * (1 - validation_fraction))
    return _corpus(name, text[:cut], text[cut:])


def _build_by_name(name):
    try:
        return tfds.builder(name.removeprefix("tfds:"), file_format="array_record")
    except tfds.core.registered.DatasetNotFoundError as error:
        raise UserError(f"data.name = {name!r}: not a TFDS dataset; see tfds.list_builders()") from error


def _prepare(builder, name):
    """Write a dataset as array_record unless it is prepared already; TFDS writes to a folder that it then renames."""
    with _one_line_errors(name, builder):
        if (
            builder.is_prepared() and builder.info.splits
        ):  # a builder made before the dataset was prepared has no splits
            return builder
    if isinstance(builder, tfds.core.BeamBasedBuilder):
        raise UserError(f"{name} needs Apache Beam to be prepared: prepare it elsewhere with {_recipe(builder, name)}")
    # By default TFDS retries ten times: minutes without any message if there is no network.
    downloader.MAX_RETRIES = RETRIES
    remedy = _quijote_remedy(builder) if isinstance(builder, Quijote) else CHECK_NETWORK
    with _one_line_errors(name, builder, remedy=remedy), _preparation_lock(builder.data_dir_root):
        # A new builder, as another process may have prepared the dataset since the old one read the disk.
        builder = type(builder)(
            data_dir=builder.data_dir_root, config=builder.builder_config, file_format="array_record"
        )
        if not builder.is_prepared():
            builder.download_and_prepare(file_format="array_record")
    return builder


@contextlib.contextmanager
def _preparation_lock(folder):
    """Hold a lock: only one process per machine prepares datasets, as TFDS replaces files that others may read."""
    folder = os.fspath(folder)
    if "://" in folder:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".attnlab.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _documents(builder, name, split, feature) -> list[str]:
    with _one_line_errors(
        name, builder, done="read", remedy=f"remove {builder.data_dir}, and it will be prepared again"
    ):
        texts = [example[feature] for example in builder.as_data_source(split=split)]
        return [text.decode("utf-8") if isinstance(text, bytes) else str(text) for text in texts]


def _build(cls, **options):
    with _one_line_errors(cls.name):
        return cls(file_format="array_record", **options)


def _quijote_remedy(builder):
    by_hand = builder.data_dir_root / "downloads" / "manual" / "quijote.txt"
    return f"check the network, put the text at {by_hand}, or use --config.data.path=FILE"


def _recipe(builder, name):
    return f"tfds build {name.removeprefix('tfds:')} --file_format=array_record, and copy it to {builder.data_dir}"


@contextlib.contextmanager
def _one_line_errors(name, builder=None, done="prepared", remedy=CHECK_NETWORK):
    """Turn TFDS failures into one-line UserErrors, and silence its progress bars and warnings."""
    tfds.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        where = _recipe(builder, name) if builder else "tfds build --file_format=array_record"
        raise UserError(
            f"{name} needs {error.name} to be prepared, which attnlab does not use: prepare it elsewhere with {where}"
        ) from error
    except PermissionError as error:
        raise UserError(
            f"{name} cannot be written to {error.filename}: set TFDS_DATA_DIR to a folder that you can write to"
        ) from error
    except Exception as error:  # network and format errors of many libraries
        what = str(error).strip().splitlines()
        raise UserError(
            f"{name} could not be {done} ({type(error).__name__}: {what[0] if what else ''}): {remedy}"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _corpus(name, train, validation) -> Corpus:
    digest = hashlib.sha256(train.encode("utf-8"))
    digest.update(validation.encode("utf-8"))
    return Corpus(name, train, validation, digest.hexdigest())
