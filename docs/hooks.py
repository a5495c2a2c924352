"""MkDocs hooks of this site, besides its plugins: rendered lessons, verdicts of studies, MathML, and checks.

Every failure raises, so that a strict build never silently omits a lesson, a figure or a public name.
"""

import html
import importlib
import inspect
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import lessons  # noqa: E402  (beside this file)

from attnlab.comparing.table import MEASURES, columns  # noqa: E402
from attnlab.config import declared  # noqa: E402
from attnlab.nn.config import KINDS  # noqa: E402
from attnlab.study import registry  # noqa: E402
from attnlab.study.running import Result, read_result  # noqa: E402

_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_PAGES = {  # where the site shows what the README links to outside docs/
    "launch/README.md": "guide/clusters.md",
    "CONTRIBUTING.md": "development.md",
}
# Lines that GitHub shows as a link, or not at all.
_STUDY = re.compile(r"^\[\w+\]\(\.\./studies/(\w+)\.py\)$", re.MULTILINE)
_STUDIES = re.compile(r"^<!-- studies ([\w ]+) -->$", re.MULTILINE)
_INCLUDED = re.compile(r"^\[[^]]+\]\((\w+\.txt|(?:\.\./)+(?:launch/)?[A-Z]+\.md)#?(\w*)\)$", re.MULTILINE)
_OPTIONS = re.compile(r"^\{\{ options \}\}$", re.MULTILINE)
_COLUMNS = re.compile(r"^\{\{ columns \}\}$", re.MULTILINE)


def on_files(files, config):
    """Adds the README as the home page, and a page with its figures for every lesson."""
    home = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    for target, page in _PAGES.items():
        home = home.replace(f"]({target})", f"]({page})")
    home = re.sub(r"\]\(notebooks/(\w+)\.ipynb\)", r"](tutorials/\1.md)", home)
    files.append(File.generated(config, "index.md", content=home))
    for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page, figures = lessons.render(source)
        files.append(File.generated(config, f"tutorials/{source.stem}.md", content=page))
        for name, content in figures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Replaces lines that name studies, tables, options or other files with their content."""
    markdown = _STUDIES.sub(lambda match: _studies(match[1].split()), markdown)
    folder = Path(page.file.abs_src_path or ROOT / "docs" / "index.md").parent
    markdown = _INCLUDED.sub(lambda match: _file(folder / match[1], match[2]), markdown)
    markdown = _OPTIONS.sub(lambda _: _options(), markdown)
    markdown = _COLUMNS.sub(lambda _: _columns(), markdown)
    return _STUDY.sub(lambda match: _study(match[1]), markdown)


def on_page_content(content, page, config, files):
    """Formulas as MathML, which browsers draw without a script."""
    return _FORMULA.sub(lambda match: _mathml(match[2].strip()), content)


def on_post_build(config):
    """Raises if a page loads something from the network, or a public name is missing from the reference."""
    site, ids = Path(config.site_dir), set()
    for page in site.rglob("*.html"):
        checked = _Page()
        checked.feed(page.read_text(encoding="utf-8"))
        if checked.external:
            raise PluginError(f"{page.relative_to(site)} loads {checked.external[0]}: ship it with the site")
        ids |= checked.ids
    for style in site.rglob("*.css"):
        if match := re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^'\")]+", style.read_text(encoding="utf-8")):
            raise PluginError(f"{style.relative_to(site)} loads {match[0]}: ship it with the site")
    if missing := sorted(set(_public_names()) - ids):
        raise PluginError(f"public names without an entry in docs/reference: {', '.join(missing)}")


_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}


class _Page(HTMLParser):
    """Anchors of a page, and the addresses of other hosts that it loads when it is opened."""

    def __init__(self):
        super().__init__()
        self.external, self.ids = [], set()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        address = values.get(_LOADED.get(tag)) or ""
        if re.match(r"(https?:)?//", address) and values.get("rel") != "canonical":
            self.external.append(address)


def _public_names():
    """Every public name: "attnlab.attention", "attnlab.masks.Causal", …"""
    modules = [importlib.import_module("attnlab")]
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                modules.append(value)
            else:
                yield f"{module.__name__}.{name}"


def _mathml(formula: str) -> str:
    display = formula.startswith(r"\[")
    return convert(html.unescape(formula[2:-2]), display="block" if display else "inline")


def _result(name: str) -> Result:
    """The result of a study's run that `make figures` kept."""
    result = read_result(ROOT / "docs" / "images" / "studies" / f"{name}.json")
    if result is None or result.claim != registry.claim(registry.load(name)):
        raise PluginError(f"docs/images/studies/{name}.json is missing, or of another claim: run `make figures`")
    return result


def _file(path: Path, section: str) -> str:
    """The line with which the site includes a file, or one of its sections."""
    return f'--8<-- "{path.resolve().relative_to(ROOT)}{section and f":{section}"}"'


def _columns() -> str:
    """The table of columns of a comparison, for texts and for tasks."""
    by_key = {column.key: column for measure in MEASURES for column in columns(measure, 5, 2)}
    lines = [f"| `{each.key}` | {each.title} | {_cell(each.help)} |" for each in by_key.values()]
    return "\n".join(["| key | column | what it is |", "|---|---|---|", *lines])


def _options() -> str:
    """The table of all config fields."""
    fields, kinds = [], {}
    for name, each in declared().items():
        default = "" if each.default == "" else f"`{each.default}`"
        choices = f" ({', '.join(f'`{choice}`' for choice in each.choices)})" if each.choices else ""
        meaning = f"{default} | {_cell(each.doc)}{choices} |"
        kind, _, option = name.removeprefix("model.").partition(".")
        if kind in KINDS:  # kinds share most options
            kinds.setdefault((option, meaning), []).append(kind)
        else:
            fields.append(f"| `{name}` | {meaning}")
    fields += [f"| `model.KIND.{option}` of {', '.join(of)} | {meaning}" for (option, meaning), of in kinds.items()]
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *fields])


def _studies(names) -> str:
    """The table of some studies and their verdicts."""
    rows = []
    for name in names:
        result = _result(name)
        verdict = "holds" if result.held else "**does not hold**"
        ran = f"{'fast, ' if result.fast else ''}{_duration(result.seconds)}"
        rows.append(f"| [{name}](#{name}) | {_cell(result.claim)} | {verdict} | {result.seeds or ''} | {ran} |")
    return "\n".join(["| study | claim | verdict | seeds | time |", "|---|---|---|---|---|", *rows])


def _study(name: str) -> str:
    """The section of a study."""
    result = _result(name)
    caption = html.escape(inspect.getdoc(registry.load(name).draw), quote=False)
    rows = "\n".join(f"| {_cell(text)} | {'held' if held else '**failed**'} |" for held, text in result.parts)
    outcome = "holds" if result.held else "does not hold"
    seeds = f"{result.seeds} seed{'s' * (result.seeds != 1)}, " if result.seeds else ""
    run = f"{'A fast' if result.fast else 'A full'} run: {seeds}{_duration(result.seconds)} on {result.machine}"
    setup = html.escape(inspect.cleandoc(result.setup)).replace("\n\n", "</p><p>")
    return (
        f"### {name}\n\n**Claim.** {result.claim}\n\n![{name}: the measured figure](images/studies/{name}.png)\n\n"
        f"{caption}\n\n"
        f"**Verdict.** In this run the claim {outcome}.\n\n| measured | |\n|---|---|\n{rows}\n\n"
        f"{run}, JAX {result.versions['jax']}, {result.date}.\n\n"
        f"<details><summary>How it was measured</summary><p>{setup}</p></details>\n"
    )


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
