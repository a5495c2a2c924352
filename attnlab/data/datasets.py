"""TFDS datasets as documents: Don Quijote and any text dataset, read from array_record without TensorFlow.

TFDS stores prepared datasets in the folder TFDS_DATA_DIR, by default `~/tensorflow_datasets`.
"""

import contextlib
import functools
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader

from attnlab.data import sources
from attnlab.data.sources import Piece
from attnlab.support.errors import UserError
from attnlab.support.paths import lock

GUTENBERG_QUIJOTE = "https://www.gutenberg.org/cache/epub/2000/pg2000.txt"
RETRIES = 4  # download attempts
CHECK_NETWORK = "check the network, or prepare it elsewhere as array_record"
BLOCK = 64  # documents read at once


class Dataset(NamedTuple):
    """A prepared TFDS dataset, with its training split and, if it has one, a validation split."""

    name: str
    builder: tfds.core.DatasetBuilder
    feature: str
    splits: tuple[str, ...]
    separator: str

    def signature(self) -> list | None:
        folder = os.fspath(self.builder.data_dir)
        if "://" in folder:
            return None
        files = sorted(os.path.join(folder, name) for name in os.listdir(folder))
        return [self.feature, list(self.splits), self.separator, sources.stamps(files)]

    def pieces(self) -> Iterator[Piece]:
        """The text: the documents of the training split, then the held-out documents."""
        for number, split in enumerate(self.splits):
            if number:
                yield Piece(self.separator, ends=False, held_out=True)
            yield from sources.joined(self._documents(split), self.separator, held_out=number > 0)

    def _documents(self, split: str) -> Iterator[str]:
        remedy = f"remove {self.builder.data_dir}, and it will be prepared again"
        with _one_line_errors(self.name, self.builder, done="read", remedy=remedy):
            examples = self.builder.as_data_source(split=split)
            count = len(examples)
        for start in range(0, count, BLOCK):
            with _one_line_errors(self.name, self.builder, done="read", remedy=remedy):
                block = examples.__getitems__(list(range(start, min(start + BLOCK, count))))
                texts = [example[self.feature] for example in block]
                texts = [text.decode("utf-8") if isinstance(text, bytes) else str(text) for text in texts]
            yield from texts


def find(name: str, feature: str = "") -> Dataset:
    """Find a dataset by name and prepare it if necessary; an empty `feature` means "text" or the only text feature."""
    with _one_line_errors(name):
        make = Quijote if name == "quijote" else functools.partial(tfds.builder, name.removeprefix("tfds:"))
        builder = make(file_format="array_record")
    builder = _prepare(builder, name)
    if name == "quijote":
        return Dataset(name, builder, "text", ("train",), "")
    texts = [key for key, kind in builder.info.features.items() if isinstance(kind, tfds.features.Text)]
    feature = feature or ("text" if "text" in texts or len(texts) != 1 else texts[0])
    if feature not in texts:
        raise UserError(
            f"{name} has the text features {', '.join(texts) or '(none)'}: choose one with --config.data.feature=…"
        )
    splits = list(builder.info.splits)
    train = "train" if "train" in splits else splits[0]
    held_out = [split for split in ("validation", "test") if split in splits and split != train]
    return Dataset(name, builder, feature, (train, *held_out[:1]), sources.SEPARATOR)


class Quijote(tfds.core.GeneratorBasedBuilder):
    """Cervantes, El ingenioso hidalgo don Quijote de la Mancha (1605, 1615): book 2000 of Project Gutenberg.

    A UTF-8 text at `downloads/manual/quijote.txt` replaces the download.
    """

    name = "attnlab_quijote"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, description=self.__doc__, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(dl_manager)}

    def _generate_examples(self, dl_manager):
        by_hand = Path(os.fspath(dl_manager.download_dir)) / "manual" / "quijote.txt"
        path = by_hand if by_hand.exists() else Path(os.fspath(dl_manager.download(GUTENBERG_QUIJOTE)))
        text = "".join(piece.text for piece in sources.Files("text", (str(path),), "").pieces())
        yield 0, {"text": _between_gutenberg_marks(text)}


def _between_gutenberg_marks(text: str) -> str:
    for mark, side in (("*** START OF", 1), ("*** END OF", 0)):
        if mark in text:
            text = text.split(mark, 1)[side]
            text = text.split("\n", 1)[1] if side else text
    return text.replace("\r\n", "\n").strip() + "\n"


def _prepare(builder, name):
    """Write a dataset as array_record unless it is prepared; TFDS writes to a folder and renames it."""
    with _one_line_errors(name, builder):
        # A builder created before the dataset was prepared has no splits.
        if builder.is_prepared() and builder.info.splits:
            return builder
    if isinstance(builder, tfds.core.BeamBasedBuilder):
        raise UserError(f"preparing {name} needs Apache Beam: prepare it elsewhere with {_recipe(builder, name)}")
    # Without a network, the default of ten attempts would take minutes without any message.
    downloader.MAX_RETRIES = RETRIES
    remedy = CHECK_NETWORK
    if isinstance(builder, Quijote):
        by_hand = builder.data_dir_root / "downloads" / "manual" / "quijote.txt"
        remedy = f"check the network, put the text at {by_hand}, or use --config.data.path=FILE"
    with _one_line_errors(name, builder, remedy=remedy), _preparation_lock(builder.data_dir_root):
        # A new builder notices if another process has prepared the dataset meanwhile.
        builder = type(builder)(
            data_dir=builder.data_dir_root, config=builder.builder_config, file_format="array_record"
        )
        if not builder.is_prepared():
            builder.download_and_prepare(file_format="array_record")
    return builder


@contextlib.contextmanager
def _preparation_lock(folder):
    """Let only one process per machine prepare datasets, because TFDS replaces files that others may read."""
    if "://" in os.fspath(folder):
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".attnlab.lock"), "w") as file:
        lock(file.fileno(), wait=True)
        yield


def _recipe(builder, name):
    return f"tfds build {name.removeprefix('tfds:')} --file_format=array_record, and copy it to {builder.data_dir}"


@contextlib.contextmanager
def _one_line_errors(name, builder=None, done="prepared", remedy=CHECK_NETWORK):
    """Raise TFDS failures as one-line UserErrors, and silence its progress bars and warnings."""
    tfds.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except UserError:
        raise
    except tfds.core.registered.DatasetNotFoundError as error:
        raise UserError(f"data.name = {name!r}: not a TFDS dataset; see tfds.list_builders()") from error
    except ModuleNotFoundError as error:
        where = _recipe(builder, name) if builder else "tfds build --file_format=array_record"
        raise UserError(
            f"preparing {name} needs {error.name}, which attnlab does not use: prepare it elsewhere with {where}"
        ) from error
    except PermissionError as error:
        raise UserError(
            f"{name} cannot be written to {error.filename}: set TFDS_DATA_DIR to a folder that you can write to"
        ) from error
    except Exception as error:  # network and format errors of many libraries
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{name} could not be {done} ({type(error).__name__}: {first}): {remedy}") from error
    finally:
        logging.disable(logging.NOTSET)
