"""`load`: where it looks, what it chooses, and which bytes reach the driver."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

LOAD = "k = loader.load(ARTIFACTS, devices=[0]{}); say(k.info())"


def digests(manifest: dict[str, Any], arch: str, form: str) -> set[str]:
    return {b[form]["sha256"] for b in manifest["binaries"] if b["arch"] == arch}


def loaded(outcome) -> set[str]:
    return {call["sha256"] for call in outcome.named("cuLibraryLoadData")}


def test_machine_code_of_the_device_is_loaded_at_once_and_nothing_else(
    recorder, artifacts, manifest
):
    outcome = recorder.loader(artifacts, LOAD.format(""), env={"SONATA_TEST_CUDA_CC": "9.0"})
    assert loaded(outcome) == digests(manifest, "sm90", "cubin")
    assert outcome.value["devices"]["0"]["arch"] == "sm90"
    assert outcome.value["digest"] == manifest["digest"]
    assert outcome.value["selection"] == manifest["selection"]
    assert 0 < outcome.value["load_ms"] < 60_000
    assert len(outcome.named("cuKernelGetFunction")) == len(digests(manifest, "sm90", "cubin"))


def test_a_device_of_the_same_major_takes_the_older_machine_code(recorder, artifacts, manifest):
    outcome = recorder.loader(artifacts, LOAD.format(""), env={"SONATA_TEST_CUDA_CC": "8.9"})
    assert loaded(outcome) == digests(manifest, "sm86", "cubin")


def test_ptx_is_loaded_at_first_use_only(recorder, artifacts, manifest):
    outcome = recorder.loader(
        artifacts,
        """
        k = loader.load(ARTIFACTS, arch="sm86", allow_ptx=True, devices=[0])
        before = len(open(os.environ["SONATA_TEST_CUDA_LOG"]).read().split("cuLibraryLoadData")) - 1
        k.gemv(tensor(1, 64), tensor(16, 64))
        k.gemv(tensor(1, 64), tensor(16, 64))
        say(before)
        """,
        env={"SONATA_TEST_CUDA_CC": "9.0"},
    )
    assert outcome.value == 0
    assert len(outcome.named("cuLibraryLoadData")) == 1
    assert loaded(outcome) < digests(manifest, "sm86", "ptx")
    assert len(outcome.named("cuLaunchKernel")) == 2


def test_preload_compiles_ptx_at_once(recorder, artifacts, manifest):
    named = ["gemv", "gemv_any"]
    script = LOAD.format(f", arch='sm86', allow_ptx=True, preload={named}")
    outcome = recorder.loader(artifacts, script, env={"SONATA_TEST_CUDA_CC": "9.0"})
    wanted = [b for b in manifest["binaries"] if b["kernel"] in named]
    assert loaded(outcome) == digests({"binaries": wanted}, "sm86", "ptx")


def on_device_0(arguments: str) -> str:
    return f"loader.load(ARTIFACTS, devices=[0], {arguments})"


REFUSED = {
    "arch='sm86'": ("VariantMissing", "sm86", "allow_ptx=True", "does not run"),
    "arch='sm77'": ("UsageError", "sm77", "sm86"),
    "arch=''": ("UsageError", "''", "sm86"),
    "arch=86": ("ArgumentError", "arch is 86", "'sm86'"),
    "arch=b'sm86'": ("ArgumentError", "arch is b'sm86'"),
    "preload=['nothing']": ("ArgumentError", "nothing", "gemv"),
    "preload='gemv'": ("ArgumentError", "['gemv']"),
    "preload=5": ("ArgumentError", "preload is 5", "list"),
    "preload=None": ("ArgumentError", "preload is None"),
    "preload=[['x']]": ("ArgumentError", "[['x']]", "list"),
    "preload=[b'gemv']": ("ArgumentError", "b'gemv'"),
}


def test_what_cannot_be_loaded_is_refused(recorder, artifacts):
    cases = {on_device_0(arguments): expected for arguments, expected in REFUSED.items()}
    outcome = recorder.refused(artifacts, cases, env={"SONATA_TEST_CUDA_CC": "9.0"})
    assert not outcome.named("cuLibraryLoadData")


def test_a_device_that_nothing_runs_on(recorder, artifacts):
    words = ("sm86 cubin", "sm90 cubin", "8.0", "--arch sm80 --arch sm86 --arch sm90")
    cases = {on_device_0(""): ("VariantMissing", *words)}
    outcome = recorder.refused(artifacts, cases, env={"SONATA_TEST_CUDA_CC": "8.0"})
    assert not outcome.named("cuLibraryLoadData")


NO_DEVICES = {
    "[7]": ("DriverUnavailable", "no device 7", "2"),
    "['cpu']": ("ArgumentError", "'cpu'", "CUDA"),
    "[-1]": ("ArgumentError", "-1"),
    "[True]": ("ArgumentError", "True"),
    "[]": ("ArgumentError", "empty"),
    "3.5": ("ArgumentError", "3.5"),
    "[None]": ("ArgumentError", "None"),
    "['nonsense']": ("ArgumentError", "'nonsense'"),
    # Torch's `cuda:256` is `cuda:0`, its `cuda:255` has the number -1.
    "'cuda:255'": ("ArgumentError", "'cuda:255'"),
    "'cuda:256'": ("ArgumentError", "'cuda:256'"),
    "[torch.device('cuda:254')]": ("ArgumentError", "device(type='cuda'"),
    "torch.tensor(0)": ("ArgumentError", "tensor(0)"),
    "b'cpu'": ("ArgumentError", "b'cpu'"),
    "None": ("DriverUnavailable", "no CUDA device", "CUDA build"),
    "'cuda'": ("DriverUnavailable", "torch cannot use CUDA here", "CUDA build"),
    "[0, 'cuda']": ("DriverUnavailable", "torch cannot use CUDA here"),
    "torch.device('cuda')": ("DriverUnavailable", "torch cannot use CUDA here"),
}


def test_devices_that_are_none(recorder, artifacts):
    cases = {f"loader.load(ARTIFACTS, devices={text})": why for text, why in NO_DEVICES.items()}
    recorder.refused(artifacts, cases, env={"SONATA_TEST_CUDA_DEVICES": "2"})


def test_a_free_threaded_python_is_refused(recorder, artifacts):
    why = ("MissingDependency", "needs a Python with the GIL", "use the usual build of Python")
    recorder.refused(artifacts, {"loader.load(ARTIFACTS)": why}, "import sys\nsys.abiflags = 't'")


PATHS = """
import pathlib
class Named(os.PathLike):
    def __init__(self, path):
        self.path = path
    def __fspath__(self):
        return self.path
"""
NO_PATHS = {
    "123": ("ArgumentError", "path is 123"),
    "0.5": ("ArgumentError", "path is 0.5"),
    "[]": ("ArgumentError", "path is []"),
    "b'x'": ("ArgumentError", "path is b'x'"),
    "Named(b'x')": ("ArgumentError", "path is <"),
    "''": ("ArgumentError", "path is ''"),
    "Named('')": ("ArgumentError", "path is <"),
    "'x' + chr(0)": ("ArgumentError", "NUL"),
}


def test_paths_that_are_none(recorder, artifacts):
    cases = {f"loader.load({path}, devices=[0])": why for path, why in NO_PATHS.items()}
    recorder.refused(artifacts, cases, PATHS)


def test_paths_of_any_kind(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        PATHS + "paths = (ARTIFACTS + '/', pathlib.Path(ARTIFACTS), Named(ARTIFACTS))\n"
        "say([loader.load(path, devices=[0]).info()['directory'] for path in paths])",
    )
    assert outcome.value == [str(artifacts)] * 3


def test_only_the_devices_named_get_a_context(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        """
        for devices in ([1], 1, "cuda:1", torch.device("cuda", 1)):
            say(list(loader.load(ARTIFACTS, devices=devices).info()["devices"]))
        """,
        env={"SONATA_TEST_CUDA_DEVICES": "3"},
    )
    assert outcome.stdout == "[1]\n" * 4
    assert [call["device"] for call in outcome.named("cuDevicePrimaryCtxRetain")] == [1]


def test_a_device_that_is_named_twice_is_loaded_once(recorder, artifacts, manifest):
    outcome = recorder.loader(
        artifacts,
        """
        devices = [1, "cuda:1", torch.device("cuda", 1), 0]
        loaded = loader.load(ARTIFACTS, devices=devices).info()["devices"]
        say([runtime.device_indices(devices), list(loaded)])
        """,
        env={"SONATA_TEST_CUDA_DEVICES": "2"},
    )
    assert outcome.value == [[1, 0], [1, 0]]
    assert len(outcome.named("cuLibraryLoadData")) == 2 * len(digests(manifest, "sm90", "cubin"))


def test_loading_twice_gives_the_driver_the_bytes_once(recorder, artifacts, manifest):
    outcome = recorder.loader(
        artifacts,
        "[loader.load(ARTIFACTS, devices=[0]) for _ in range(3)]; say(0)",
        env={"SONATA_TEST_CUDA_CC": "9.0"},
    )
    assert len(outcome.named("cuLibraryLoadData")) == len(digests(manifest, "sm90", "cubin"))


def damaged(artifacts: Path, folder: Path) -> Path:
    copy = folder / "damaged"
    shutil.copytree(artifacts, copy)
    copy.chmod(0o700)
    return copy


def test_one_flipped_bit_is_refused_before_the_driver_sees_it(
    recorder, artifacts, manifest, tmp_path
):
    copy = damaged(artifacts, tmp_path)
    name = sorted(digests(manifest, "sm90", "cubin"))[-1]
    target = copy / "objects" / f"{name}.cubin"
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    outcome = recorder.loader(
        copy,
        "say(failure(lambda: loader.load(ARTIFACTS, devices=[0])))",
        env={"SONATA_TEST_CUDA_CC": "9.0"},
    )
    assert outcome.value["type"] == "IntegrityError"
    assert name in outcome.value["message"]
    assert hashlib.sha256(data).hexdigest() not in loaded(outcome)


SEARCH = "say(failure(lambda: loader.load(devices=[0])) or loader.load(devices=[0]).info())"


def test_the_environment_names_the_directory(recorder, artifacts):
    outcome = recorder.loader(artifacts, SEARCH, env={"SONATA_AOT_DIR": str(artifacts)})
    assert outcome.value["directory"] == str(artifacts)


def test_a_named_directory_without_artifacts_ends_the_search(recorder, artifacts, tmp_path):
    (tmp_path / "cache").mkdir()
    shutil.copytree(artifacts, tmp_path / "cache" / "artifacts")
    cache = {"SONATA_AOT_CACHE_DIR": str(tmp_path / "cache")}
    found = recorder.loader(artifacts, SEARCH, env=cache)
    assert found.value["directory"] == str(tmp_path / "cache" / "artifacts")
    wrong = recorder.loader(artifacts, SEARCH, env={**cache, "SONATA_AOT_DIR": "/nowhere"})
    assert wrong.value["type"] == "ArtifactsNotFound"
    assert "/nowhere" in wrong.value["message"]


def test_without_any_artifacts_every_place_is_named_with_its_reason(recorder, artifacts):
    outcome = recorder.loader(artifacts, SEARCH, env={"SONATA_TEST_CUDA_CC": "8.6"})
    message = outcome.value["message"]
    assert outcome.value["type"] == "ArtifactsNotFound"
    assert "the installed wheel" in message
    assert "the user cache" in message
    assert "sonata-aot build --arch sm86" in message


def test_an_old_driver_is_told_what_it_lacks(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        "say(failure(lambda: loader.load(ARTIFACTS, devices=[0], arch='sm86', allow_ptx=True)))",
        env={"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_VERSION": "12040"},
    )
    assert "needs a driver of CUDA 12.9, this one is 12.4" in outcome.value["message"]


def test_the_log_says_what_was_chosen(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        LOAD.format(""),
        env={"SONATA_TEST_CUDA_CC": "9.0", "SONATA_AOT_LOG_LEVEL": "info"},
    )
    assert "sm90 cubin" in outcome.stderr
    assert " ms" in outcome.stderr
    silent = recorder.loader(artifacts, LOAD.format(""), env={"SONATA_TEST_CUDA_CC": "9.0"})
    assert "sonata" not in silent.stderr


def test_without_a_driver_load_says_so(recorder, artifacts):
    outcome = recorder.loader(
        artifacts, "say(failure(lambda: loader.load(ARTIFACTS, devices=[0])))", library_path=[]
    )
    assert outcome.value["type"] == "DriverUnavailable"
    assert "libcuda.so.1" in outcome.value["message"]


def test_the_applications_level_is_left_alone(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        """
        import logging
        logger = logging.getLogger("sonata_aot")
        for level in ("NOTSET", "DEBUG", "ERROR"):
            logger.setLevel(level)
            loader.load(ARTIFACTS, devices=[0])
            say([logging.getLevelName(logger.level), logger.handlers, logger.propagate])
        """,
    )
    assert outcome.stdout.splitlines() == [
        f'["{level}", [], true]' for level in ("NOTSET", "DEBUG", "ERROR")
    ]
    assert outcome.stderr == ""  # nobody asked for messages


def test_an_application_that_wants_them_gets_the_messages_once(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        """
        import logging
        logging.basicConfig(level="INFO", format="app: %(message)s")
        loader.load(ARTIFACTS, devices=[0])
        """,
    )
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("app: device 0 (Recording GPU 0): sm90 cubin")


def test_a_level_that_is_none_is_refused(recorder, artifacts):
    outcome = recorder.loader(
        artifacts,
        "say(failure(lambda: loader.load(ARTIFACTS, devices=[0])))",
        env={"SONATA_AOT_LOG_LEVEL": "loud"},
    )
    assert outcome.value["type"] == "ArgumentError"
    assert "SONATA_AOT_LOG_LEVEL='loud'" in outcome.value["message"]


def test_without_torch_load_says_so_in_one_line(recorder, artifacts):
    outcome = recorder.run(
        "import sys; sys.modules['torch'] = None\n"
        "from sonata_aot import loader\n"
        "try: loader.load('/nowhere')\n"
        "except loader.SonataError as error: print(error)",
    )
    assert outcome.stdout.count("\n") == 1
    assert "pip install 'sonata-aot[torch]'" in outcome.stdout


def test_importing_the_loader_imports_no_torch_and_no_compiler(recorder):
    outcome = recorder.run(
        "import sys; from sonata_aot import loader\n"
        "print(sorted({'torch', 'cutlass', 'triton', 'tvm_ffi', 'sonata_aot.kernels', "
        "'sonata_aot.aot'} & set(sys.modules)))"
    )
    assert outcome.stdout.strip() == "[]"
    assert not outcome.calls


def test_each_file_is_read_and_hashed_once(recorder, artifacts, manifest):
    """However many devices take it; the manifest, too."""
    outcome = recorder.loader(
        artifacts,
        """
        import hashlib, os
        from collections import Counter
        hashed, opened, sha256, plain_open = Counter(), Counter(), hashlib.sha256, os.open
        def counted(data=b""):
            hashed[sha256(data).hexdigest()] += 1
            return sha256(data)
        def seen(path, *given, **named):
            opened[os.path.basename(path)] += 1
            return plain_open(path, *given, **named)
        hashlib.sha256, os.open = counted, seen
        loader.load(ARTIFACTS, devices=[0, 1])
        say([dict(hashed), dict(opened)])
        """,
        env={"SONATA_TEST_CUDA_CC": "9.0", "SONATA_TEST_CUDA_DEVICES": "2"},
    )
    hashed, opened = outcome.value
    files = {
        binary["cubin"]["sha256"] for binary in manifest["binaries"] if binary["arch"] == "sm90"
    }
    assert hashed == dict.fromkeys((*files, manifest["digest"]), 1)
    names = {f"{digest}.cubin" for digest in files}
    assert {name: count for name, count in opened.items() if name in names} == dict.fromkeys(
        names, 1
    )
    assert opened["manifest.json"] == 1


def test_untrusted_artifacts_load_only_where_they_are_allowed(recorder, artifacts, tmp_path):
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    copy.chmod(0o777)
    outcome = recorder.loader(
        copy,
        """
        from sonata_aot.artifacts.errors import UntrustedPath
        try:
            loader.load(ARTIFACTS, devices=[0])
        except UntrustedPath as error:
            refused = str(error)
        k = loader.load(ARTIFACTS, devices=[0], allow_untrusted=True)
        say([refused, k.info()["untrusted"]])
        """,
        env={"SONATA_TEST_CUDA_CC": "9.0", "SONATA_AOT_LOG_LEVEL": "warning"},
    )
    refused, recorded = outcome.value
    assert f"{copy} is writable by everybody" in refused
    assert recorded == [f"{copy} is writable by everybody"]
    assert len(loaded(outcome)) > 1


def test_damage_is_no_matter_of_trust(recorder, artifacts, tmp_path):
    copy = Path(shutil.copytree(artifacts, tmp_path / "copy"))
    for path in (copy / "objects").iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    outcome = recorder.loader(
        copy,
        """
        from sonata_aot.artifacts.errors import IntegrityError
        try:
            loader.load(ARTIFACTS, devices=[0], allow_untrusted=True)
        except IntegrityError as error:
            say(str(error))
        """,
        env={"SONATA_TEST_CUDA_CC": "9.0"},
    )
    assert "SHA-256" in outcome.value
    assert loaded(outcome) == set()
