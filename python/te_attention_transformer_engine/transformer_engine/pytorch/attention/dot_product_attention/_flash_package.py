"""The installed versions 2 and 3 of flash-attn."""

from importlib import import_module, metadata

from packaging.version import Version

OURS = "2.8.3"  # the interface that our engines implement without a package


def _installed(package: str) -> Version | None:
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


class FlashAttentionUtils:
    """The capabilities of FlashAttention: class attributes that programs read and may set.

    is_installed is True also without a package, because our engines run the calls then.
    """

    version_required = Version("2.1.1")
    version_required_blackwell = Version("2.7.3")
    max_version = Version("2.8.3")
    warning_printed = v3_warning_printed = False
    v3_installation_steps = "pip install flash-attn-3"

    package: object = None  # the module of version 2, if it is usable
    package3: object = None  # the module of version 3

    @staticmethod
    def set_flash_attention_version() -> None:
        """Looks for flash-attn 2."""
        cls, found = FlashAttentionUtils, _installed("flash-attn")
        if found is not None and cls.version_required <= found <= cls.max_version:
            cls.package = import_module("flash_attn.flash_attn_interface")
        cls.is_installed = True
        cls.version = version = found if cls.package is not None else Version(OURS)
        for flag in ("2", "2.1", "2.3", "2.4", "2.4.1", "2.5", "2.5.7", "2.6.0", "2.7.0"):
            name = "v" + flag.replace(".", "_") + "_plus"
            setattr(cls, name, version >= Version(flag))

    @staticmethod
    def set_flash_attention_3_params() -> None:
        """Looks for flash-attn 3. Our engines do not replace it."""
        cls, found = FlashAttentionUtils, _installed("flash-attn-3")
        if found is not None:
            cls.package3 = import_module("flash_attn_3.flash_attn_interface")
        cls.v3_is_installed = cls.use_v3 = found is not None
        cls.fa3_version = found or Version("0")
        cls.v3_0_0_beta = Version("3.0.0b") < cls.fa3_version < Version("3.0.0")


FlashAttentionUtils.set_flash_attention_version()
FlashAttentionUtils.set_flash_attention_3_params()


def is_v3(version: Version) -> bool:
    """Whether this is a version of flash-attn 3."""
    return version >= Version("3.0.0b")


def module_of(version: Version) -> object:
    """The module with the functions of this version; None if it is not installed."""
    return FlashAttentionUtils.package3 if is_v3(version) else FlashAttentionUtils.package
