"""Reads what a node found when it took a model in: checked as if it came from anybody."""

from __future__ import annotations

from exaserve_ops.adapters.model_folder import json_object
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.architecture import UnknownArchitectureError, read_architecture
from exaserve_ops.serving.domain.manifest import EncodedManifest, FileEntry
from exaserve_ops.serving.domain.weights_size import UnknownWeights, weights_of_files
from exaserve_ops.serving.services.models import ModelFacts
from workers.protocol import manifest as manifests
from workers.protocol.imports import FindingsError, decode_findings

_MOST_PARAMETERS = 1 << 62
_MOST_LOCATION = 1000


class ModelFindings:
    """Implements the controllers' port."""

    def read(self, data: bytes, digest: str) -> ModelFacts:
        """What was found. Raises `InvalidInputError` naming what is wrong with it."""
        try:
            findings = decode_findings(data, digest)
            manifest = manifests.decode(findings.manifest, findings.manifest_digest)
        except (FindingsError, manifests.ManifestError) as error:
            raise InvalidInputError("findings", str(error)) from error
        config = json_object(findings.config, "config.json")
        try:
            architecture = read_architecture(config)
        except UnknownArchitectureError as error:
            raise InvalidInputError("findings", f"config.json: {error}") from error
        files = tuple(FileEntry(file.path, file.size_bytes, file.sha256) for file in manifest.files)
        index = {"weight_map": dict(enumerate(findings.shards))} if findings.shards else None
        size = weights_of_files(files, index)
        if isinstance(size, UnknownWeights):
            raise InvalidInputError("findings", f"the size of its weights is not known: {size.reason}")
        if not 0 <= findings.parameter_count <= _MOST_PARAMETERS or len(findings.location) > _MOST_LOCATION:
            raise InvalidInputError("findings", "its parameters or its place make no sense")
        return ModelFacts(
            source=findings.location,
            files=files,
            architecture=architecture,
            parameter_count=findings.parameter_count,
            config=config,
            weights_bytes=size.bytes,
            manifest=EncodedManifest(findings.manifest_digest, findings.manifest),
        )
