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

    def check(self, others: Sequence[tuple[str, bytes, bytes]]) -> list[str]:
        """The fingerprints of the others, each given as a public key with signature and content.

        Raises:
            UserError: if the policy names partners, and one of the others is none of them.
        """
        prints = [_fingerprint(public) for public, _, _ in others]
        allowed = self.site.policy.partners
        if not allowed:
            return prints
        seen = {self.site.fingerprint}
        for (public, signature, content), found in zip(others, prints, strict=True):
            if found not in allowed or found in seen:
                shown = one_line(public, 40) or "a site without a key"
                raise UserError(
                    f"its policy names the partners that it adds up with, and {shown} is none, or comes twice"
                )
            if not keys.is_signed(public, signature, PURPOSE, content):
                raise UserError(f"the keys of partner {found} are not signed by it")
            seen.add(found)
        return prints


def _fingerprint(public: str) -> str:
    """Of a key line from someone else, which may be anything."""
    try:
        return keys.fingerprint(public)
    except (ValueError, IndexError):
        return ""
