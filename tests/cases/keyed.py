"""D7's process: the keys of one request, under whatever environment it was started in."""

from __future__ import annotations

import getpass
import json
import logging
import os
import platform
import socket

import torch

import aotcache
from aotcache.errors import ArtifactMiss
from tests.cases import tiny
from tests.cases.support import make_batch


def main(spec: str, store: str, elsewhere: str | None) -> None:
    """Print the key of a training and of an inference call. With `elsewhere`, a folder, in
    another working directory, under other names, verbose, and as another rank."""
    model = tiny.build()
    if elsewhere is not None:
        os.chdir(elsewhere)
        socket.gethostname = lambda: "another-host"
        platform.node = lambda: "another-host"
        getpass.getuser = lambda: "somebody"
        logging.basicConfig(level=logging.DEBUG)
        for module in (model, *model.blocks, *(block.norm for block in model.blocks)):
            module.rank = 3
            module.device_index = 1
            module.logger = logging.getLogger("somebody")
    keys = []
    with aotcache.attach(model, spec, store=store):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                try:
                    model(**make_batch())
                except ArtifactMiss as miss:
                    keys.append(miss.details["key"])
    print(json.dumps(keys))
