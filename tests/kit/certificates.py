"""Authorities and certificates for tests, by deploy/certificates.sh and openssl."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from relaxd.rpc.tls import TlsFiles

SCRIPT = Path(__file__).parents[2] / "deploy" / "certificates.sh"


@dataclass(frozen=True)
class CertificateAuthority:
    """A folder with a CA; `ca.crt`, `service.crt` and so on are there from the start."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, *names: str) -> "CertificateAuthority":
        """Make one by the script, with certificates for localhost and `names`; skips where there is no openssl."""
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl command")
        subprocess.run([SCRIPT, folder, *names], check=True, timeout=60, stdout=subprocess.DEVNULL)
        return cls(folder)

    @property
    def certificate(self) -> str:
        """The CA's own certificate."""
        return str(self.folder / "ca.crt")

    def issue(self, name: str, alternative_names: str = "DNS:localhost,IP:127.0.0.1", days: int = 30) -> None:
        """Write NAME.crt and NAME.key; a negative number of days makes a certificate that has expired."""
        (self.folder / "extensions").write_text(f"subjectAltName={alternative_names}\n")
        self._openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", f"{name}.key")
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}", "-out", "request")
        self._openssl(
            *("x509", "-req", "-in", "request", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", str(days), "-extfile", "extensions", "-out", f"{name}.crt"),
        )

    def files(self, name: str = "", *, clients: bool = False, server_name: str = "") -> TlsFiles:
        """What a process needs that trusts this CA and, with a `name`, has that certificate."""
        return TlsFiles(
            certificate=str(self.folder / f"{name}.crt") if name else "",
            key=str(self.folder / f"{name}.key") if name else "",
            ca=self.certificate,
            client_ca=self.certificate if clients else "",
            name=server_name,
        )

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, timeout=60, cwd=self.folder, capture_output=True)


def environment(files: TlsFiles) -> dict[str, str]:
    """The same as environment variables."""
    return {f"RELAXD_TLS_{name.upper()}": value for name, value in vars(files).items() if value}
