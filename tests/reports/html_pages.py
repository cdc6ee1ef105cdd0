"""Parses HTML pages into elements, texts, table cells and pictures."""

import base64
import re
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """What a page holds; refuses elements that are not closed, ids that come twice and references to nothing.

    An SVG in a data URI is a page of its own, in `pictures` by the figure that it is in.
    """

    def __init__(self, text):
        super().__init__()
        self.source, self.pictures = text, {}
        self.open, self.ids, self.references, self.tags = [], [], [], []
        self.text, self.cells, self.headers = "", [], []
        self.feed(text.replace("<wbr>", ""))
        self.close()
        assert not self.open
        assert len(self.ids) == len(set(self.ids))
        assert set(self.references) <= set(self.ids)

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "tr":
            self.cells.append([])
        self.ids += [attrs["id"]] if "id" in attrs else []
        for key in ("aria-labelledby", "aria-describedby"):
            self.references += attrs.get(key, "").split()
        if tag == "figure":
            self.figure = attrs["id"]
        if tag == "img":
            kind, _, content = attrs["src"].partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.pictures[self.figure] = Page(base64.b64decode(content, validate=True).decode())
        for key in ("href", "xlink:href"):
            if key in attrs:
                assert attrs[key].startswith("#")
                self.references.append(attrs[key][1:])
        for value in attrs.values():
            self.references += re.findall(r"url\(#([^)]*)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("th", "td"):
            self.cells[-1].append(data)

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    def assert_loads_nothing(self):
        """Neither the page nor a picture in it runs or loads anything, but for the data that are in the page."""
        text = re.sub(r'src="data:[^"]*"|xmlns(:\w+)?="[^"]*"', "", self.source)
        assert not re.search(r"https?:|//|@import|@font-face", text)
        assert {name for name, _ in self.tags}.isdisjoint({"script", "link", "iframe", "image", "object"})
        assert not any(key.startswith("on") for _, attrs in self.tags for key in attrs)
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
        for picture in self.pictures.values():
            picture.assert_loads_nothing()
            assert not picture.named("img")

    def assert_colours_are_of_both_palettes(self):
        """Whatever is drawn in a colour by its name has one for light and one for dark surroundings."""
        light, dark = re.split(r"@media \(prefers-color-scheme: ?dark\)", self.source)
        for name in set(re.findall(r"var\(--([a-z]+)\)", self.source)):
            assert f"--{name}:" in light
            assert f"--{name}:" in dark
