"""Installs this repository into a virtual environment, for the Makefile: with uv if it is available, else with pip.

    python3 deploy/install.py .venv               the product
    python3 deploy/install.py .venv --extra dev   with the packages of an extra

It prints before the download what is fetched, how much and why; the installer then shows its progress. It writes the
seconds that it took to the file `seconds` in the environment, for `make demo`. It runs before anything is installed,
and also with a Python that is too old: standard library only, and syntax of old versions.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time

LEAST_PYTHON = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Options of pip that uv has under another name. uv does not read the configuration of pip.
PIP_OPTIONS = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "cert": "SSL_CERT_FILE"}
UV_FOLDER = ".venv-uv"
SECONDS_FILE = "seconds"


def wrong_python(version):
    """The advice for a Python that is too old; empty if it is not."""
    if tuple(version[:2]) >= LEAST_PYTHON:
        return ""
    return (
        "Tickertape needs Python {}.{} or newer, and this is Python {}.{}: name a newer one, as in "
        "`make demo PYTHON=python3.12`, or install uv, which brings one (`uvx --from . tickertape demo`)"
    ).format(*(LEAST_PYTHON + tuple(version[:2])))


def wants_cpu_torch(cpu_index):
    """Whether torch comes from PyTorch's index of CPU builds: on x86 the package index has torch with CUDA only."""
    if platform.machine() != "x86_64" or shutil.which("nvidia-smi"):
        return False
    from urllib.request import urlopen

    try:
        urlopen(cpu_index + "/torch/", timeout=5).close()
    except (OSError, ValueError):
        return False
    return True


def announcement(machine, has_nvidia, cpu_torch):
    """The lines that say which packages are fetched, how much that is, and why."""
    if machine == "x86_64" and not cpu_torch:
        why = "for the GPU of this machine" if has_nvidia else "because PyTorch's own index cannot be reached"
        size = f"about 3 GB (PyTorch with CUDA, {why}; it also runs on the CPU)"
    elif machine == "x86_64":
        size = "about 350 MB (PyTorch for the CPU from PyTorch's own index, because this machine has no NVIDIA driver)"
    else:
        size = "about 300 MB, half of it PyTorch"
    cached = "Packages in the installer's cache are not fetched again."
    return f"fetching and installing Tickertape's packages: {size}. {cached}"


def of_pip_configuration(listing, environment):
    """Variables for uv from the output of `pip config list`; what is set for uv already is not changed."""
    found = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        variable = PIP_OPTIONS.get(name.rpartition(".")[2])
        if variable and variable not in environment:
            found[variable] = value.strip().strip("'\"")
    return found


def find_uv(installer):
    """The path of uv; None if pip is to be used. Fetches uv (20 MB) into a folder of its own if it is not there."""
    if installer == "pip":
        return None
    own = os.path.join(ROOT, UV_FOLDER, "bin", "uv")
    found = shutil.which("uv") or (own if os.path.exists(own) else None)
    if found:
        return found
    print("fetching uv, which is faster than pip (20 MB; `make demo INSTALLER=pip` does without)", flush=True)
    folder = os.path.join(ROOT, UV_FOLDER)
    pip = os.path.join(folder, "bin", "pip")
    made = subprocess.call([sys.executable, "-m", "venv", folder]) == 0
    if made and subprocess.call([pip, "install", "--disable-pip-version-check", "uv>=0.9,<1"]) == 0:
        return own
    shutil.rmtree(folder, ignore_errors=True)
    print("uv could not be fetched; continuing with pip", flush=True)
    return None


def install(uv, folder, packages, index):
    """Make the environment and install into it; returns an exit code."""
    if uv:
        listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=-1, stderr=-1).stdout.decode()
        environment = dict(os.environ, **of_pip_configuration(listing, os.environ))
        # `--seed` adds pip, which `tickertape pull` uses. The strategy is that of pip: the best version of all indexes.
        flags = ["--index-strategy", "unsafe-best-match"] + (["--index", index] if index else [])
        made = subprocess.call([uv, "venv", "--seed", "--allow-existing", "--python", sys.executable, folder])
        python = os.path.join(folder, "bin", "python")
        command = [uv, "pip", "install", "--python", python] + flags + ["--editable", packages]
        if made == 0 and subprocess.call(command, cwd=ROOT, env=environment) == 0:
            return 0
        print("uv could not install the packages; trying pip, which reads pip's configuration", flush=True)
    code = subprocess.call([sys.executable, "-m", "venv", folder])
    if code:
        print("error: `python3 -m venv` does not work here: install python3-venv, or install uv", file=sys.stderr)
        return code
    pip = os.path.join(folder, "bin", "pip")
    extra = ["--extra-index-url", index] if index else []
    code = subprocess.call([pip, "install", "--no-compile"] + extra + ["--editable", packages], cwd=ROOT)
    if code:
        text = "the packages could not be installed; if the index cannot be reached, set PIP_INDEX_URL to a mirror"
        text += ", and run the same command again: it continues with what was fetched"
        print(f"error: {text}", file=sys.stderr)
    return code


def main(arguments):
    parser = argparse.ArgumentParser(description="Install this repository into a virtual environment.")
    parser.add_argument("folder")
    parser.add_argument("--extra", default="")
    parser.add_argument("--installer", choices=("", "uv", "pip"), default="")
    parser.add_argument("--cpu-index", default="https://download.pytorch.org/whl/cpu")
    options = parser.parse_args(arguments)
    problem = wrong_python(sys.version_info)
    if problem:
        print("error: " + problem, file=sys.stderr)
        return 2
    began = time.time()
    cpu_torch = wants_cpu_torch(options.cpu_index)
    print(announcement(platform.machine(), bool(shutil.which("nvidia-smi")), cpu_torch), flush=True)
    packages = f".[{options.extra}]" if options.extra else "."
    code = install(find_uv(options.installer), options.folder, packages, options.cpu_index if cpu_torch else "")
    if code == 0:
        with open(os.path.join(options.folder, SECONDS_FILE), "w") as file:
            file.write(f"{time.time() - began:.1f}\n")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped; the same command continues with what was fetched", file=sys.stderr)
        sys.exit(130)
