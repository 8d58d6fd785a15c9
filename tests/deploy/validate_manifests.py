"""Validates the manifests on standard input against the schemas of the named versions of Kubernetes, and prints a line
of JSON for each. Run with the Python of `make chart-tools`, which has the schemas."""

import json
import sys

import kubernetes_validate
import yaml

for document in filter(None, yaml.safe_load_all(sys.stdin.read())):
    for version in sys.argv[1:]:
        try:
            kubernetes_validate.validate(document, version, strict=True)
            problem = ""
        except kubernetes_validate.SchemaNotFoundError:
            problem = "no schema"
        except kubernetes_validate.ValidationError as error:
            problem = str(error)[:500]
        found = {"version": version, "kind": document["kind"], "name": document["metadata"]["name"], "problem": problem}
        sys.stdout.write(json.dumps(found) + "\n")
