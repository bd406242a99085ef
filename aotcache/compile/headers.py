"""The one header of torch's that is compiled in another form: half the C++ compiler's time for a graph.

Every wrapper of AOTInductor's instantiates `std::regex` and optimizes all of it, for one expression that takes
"cuda:0" apart. A copy of that header, in front of torch's own folder, has the same function without it.
"""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path

from aotcache.drafts import draft
from aotcache.types import sha256

logger = logging.getLogger(__name__)

HEADER = "torch/csrc/inductor/aoti_runtime/model_base.h"

# private torch names, tried on 2.13.0: lines of the header, each of which must be there once

_EDITS = {
    "#include <regex>\n": "\n",
    '  std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");\n': "\n",
    "  std::smatch sm;\n": "  const aotcache::DeviceMatch sm(device_str);\n",
    "  bool matched = std::regex_match(device_str, sm, re);\n": "  const bool matched = sm.matched;\n",
}

# end of private torch names

MATCH = """\
#pragma once
#include <algorithm>
#include <bitset>
#include <cstring>
#include <functional>
#include <iterator>
#include <locale>
#include <map>
#include <memory>
#include <sstream>
#include <stack>
#include <string>
#include <vector>

namespace aotcache {

// What std::regex_match finds in a text for (cpu|cuda|xpu|mps)(:([0-9]+))?
struct DeviceMatch {
  struct Group {
    bool matched = false;
    std::string text;
    const std::string& str() const { return text; }
  };

  explicit DeviceMatch(const std::string& text) {
    const auto colon = text.find(':');
    const std::string kind = text.substr(0, colon);
    matched = kind == "cpu" || kind == "cuda" || kind == "xpu" || kind == "mps";
    if (colon != std::string::npos) {
      const std::string index = text.substr(colon + 1);
      matched = matched && !index.empty() && index.find_first_not_of("0123456789") == std::string::npos;
      groups[2] = {matched, matched ? text.substr(colon) : ""};
      groups[3] = {matched, matched ? index : ""};
    }
    groups[0] = {matched, matched ? text : ""};
    groups[1] = {matched, matched ? kind : ""};
  }

  const Group& operator[](int number) const { return groups[number]; }

  bool matched = false;
  Group groups[4];
};

} // namespace aotcache
"""
"""C++ in place of the expression, and what `<regex>` includes."""


def without_regex(include: Path, folder: Path, *, called: str) -> Path | None:
    """A folder to look for headers in before `include`.

    Args:
        include: torch's include folder.
        folder: Where to make it; builders may share that, and what is there already is used.
        called: What `include` is called in messages of the compiled code; lines keep their numbers.

    Returns:
        None if this torch's header is another than expected, or none can be made: it is used as it is.
    """
    try:
        text = (include / HEADER).read_text(encoding="utf-8")
        for line, instead in _EDITS.items():
            if text.count(line) != 1:
                return None
            text = text.replace(line, instead)
        if "std::regex" in text or "std::smatch" in text:
            return None
        made = f'{MATCH}#line 1 "{called}/{HEADER}"\n{text}'.encode()
        place = folder / f"include-{sha256(made)[:16]}"
        if shlex.quote(str(place)) != str(place):
            return None  # torch's command line would take it for several words
        _make(place / HEADER, made)
    except (OSError, ValueError) as error:
        logger.warning("torch's %s is used as it is, and takes twice as long: %s", HEADER, error)
        return None
    return place


def _make(header: Path, data: bytes) -> None:
    """Write it, unless it is there: whole, or not at all."""
    if header.is_file() and header.read_bytes() == data:
        return
    header.parent.mkdir(parents=True, exist_ok=True)
    with draft(header) as (place, file):
        file.write(data)
        file.flush()
        # The same bytes have the same time, which clang++ keeps in what it precompiles.
        os.utime(place, (0, 0))
        os.replace(place, header)


__all__ = ["HEADER", "MATCH", "without_regex"]
