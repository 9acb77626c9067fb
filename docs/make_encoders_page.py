"""Writes docs/reference/encoders.md from the registry of encoders; `make docs` calls it, a test holds it current."""

from __future__ import annotations

from pathlib import Path

from selfvitmil.encoder.registry import KNOWN, KnownEncoder

HEAD = """# Encoders

Published tile encoders that selfvitmil knows: by name on the Hugging Face hub, or in a folder or file of that name. Any
other network of timm, and ViTs of the transformers library (ViT, DINOv2 with or without registers), can be loaded as
well; see [use foundation models](../how-to/use-foundation-model-features.md). Their published preprocessing leaves
colours as scanned, and so does selfvitmil unless `stain.method` is set. Licences and access are those of the owners:
read the page of each.

Made from `encoder/registry.py` by `make docs`; edit there.

| encoder | network | tile | um/px | embedding | mean; std | licence | reference |
|---|---|---|---|---|---|---|---|
"""


def row(known: KnownEncoder) -> str:
    width, depth, patch, registers, gated = known.shape
    network = f"`{known.architecture}`: width {width}, {depth} blocks, {patch}-px patches"
    network += f", {registers} registers" if registers else ""
    network += ", gated MLPs" if gated else ""
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in known.normalization)
    cells = (
        f"[{known.name}]({known.page}){' (gated)' if known.gated else ''}",
        network,
        f"{known.size_px} px",
        ", ".join(f"{value:g}" for value in known.mpp),
        f"`{known.layout}`, {known.dim}",
        f"{mean}; {std}",
        known.licence,
        known.reference,
    )
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    return HEAD + "".join(map(row, KNOWN))


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "encoders.md").write_text(page(), encoding="utf-8")
