"""Whom a site adds its uploads up with: it signs its keys of secure aggregation, and checks those of its partners.

Without partners in its policy a site takes the coordinator's word for whose keys it is sent. A coordinator could then
play all other sites, and remove every mask but the site's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedc2i.core.errors import UserError, one_line
from fedc2i.deploy import keys
from fedc2i.deploy.site_folder import SiteFolder

PURPOSE = b"fedc2i secure aggregation"


@dataclass(frozen=True)
class Partners:
    """A site's own identity, and those that its policy names by the fingerprints of their keys."""

    site: SiteFolder

    def signed(self, content: bytes) -> tuple[str, bytes]:
        """The site's public key, and its signature."""
        public = keys.read_public(self.site.folder / "site.pub")
        return public, keys.sign(keys.read_private(self.site.key), PURPOSE, content)

    def check(self, others: Sequence[tuple[str, bytes, bytes]]) -> None:
        """Raises a `UserError` unless each of the others, a public key with signature and content, is a partner."""
        allowed = self.site.policy.partners
        if not allowed:
            return
        seen = {keys.read_public(self.site.folder / "site.pub")}
        for public, signature, content in others:
            try:
                known = keys.fingerprint(public) in allowed
            except (ValueError, IndexError):
                known = False
            if not known or public in seen:
                shown = one_line(public, 40) or "a site without a key"
                raise UserError(
                    f"its policy names the partners that it adds up with, and {shown} is none, or comes twice"
                )
            if not keys.is_signed(public, signature, PURPOSE, content):
                raise UserError(f"the keys of partner {keys.fingerprint(public)} are not signed by it")
            seen.add(public)
