"""Forms of joining: tokens, and agents over SSH."""

from __future__ import annotations

from typing import Any

from django import forms

from exaserve_ops.inventory.domain.installation import Credentials
from exaserve_ops.inventory.models import NodeInstallation
from exaserve_ops.inventory.services.joining import MAX_TOKEN_USES

MAX_KEY_BYTES = 20_000
Auth = NodeInstallation.Auth


class JoinTokenForm(forms.Form):
    """A token for one node, or for all of an allocation."""

    uses = forms.IntegerField(
        min_value=1, max_value=MAX_TOKEN_USES, initial=1, required=False, label="Nodes that may join with it"
    )
    hours = forms.ChoiceField(
        choices=[("1", "1 hour"), ("8", "8 hours"), ("24", "a day"), ("168", "a week")],
        initial="1",
        required=False,
        label="Valid for",
    )
    note = forms.CharField(max_length=200, required=False, help_text="Shown in the history.")


class CredentialsForm(forms.Form):
    """How to sign in. Nothing of it is shown again, and nothing is kept in the database."""

    auth = forms.ChoiceField(choices=Auth.choices, initial=Auth.KEY, label="Sign in with")
    key_file = forms.FileField(
        required=False, label="Private key", help_text="OpenSSH or PEM; kept sealed for half an hour at most."
    )
    passphrase = forms.CharField(
        required=False,
        max_length=1000,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
    )
    password = forms.CharField(
        required=False,
        max_length=1000,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
        help_text="Kept sealed for half an hour at most.",
    )

    def clean_key_file(self) -> str:
        """Read the key as text. It is looked at closely by whoever uses it."""
        upload = self.cleaned_data.get("key_file")
        if upload is None:
            return ""
        if upload.size > MAX_KEY_BYTES:
            raise forms.ValidationError("This is too large for a private key.")
        try:
            return str(upload.read().decode())
        except UnicodeDecodeError as error:
            raise forms.ValidationError("This is no private key in OpenSSH or PEM form.") from error

    def clean(self) -> dict[str, Any]:
        """See that what the chosen way needs is there."""
        cleaned = super().clean() or {}
        auth = cleaned.get("auth")
        if auth == Auth.KEY and not cleaned.get("key_file") and "key_file" not in self.errors:
            self.add_error("key_file", "Choose the file of the private key.")
        if auth == Auth.PASSWORD and not cleaned.get("password"):
            self.add_error("password", "Give the password.")
        return cleaned

    def credentials(self) -> Credentials:
        """What was given, for the way that was chosen."""
        if self.cleaned_data["auth"] == Auth.KEY:
            return Credentials(
                private_key=self.cleaned_data["key_file"], passphrase=self.cleaned_data["passphrase"]
            )
        if self.cleaned_data["auth"] == Auth.PASSWORD:
            return Credentials(password=self.cleaned_data["password"])
        return Credentials()


class InstallationForm(CredentialsForm):
    """A machine that an agent is wanted on."""

    host = forms.CharField(max_length=253, help_text="Name or address of the machine.")
    port = forms.IntegerField(min_value=1, max_value=65_535, initial=22)
    user = forms.CharField(max_length=64, help_text="The agent runs as this user.")
    node_name = forms.CharField(max_length=120, required=False, help_text="Empty: the host.")
    address = forms.CharField(
        max_length=255, required=False, help_text="Where gateways reach its replicas; empty: the host."
    )
    folder = forms.CharField(
        max_length=500, initial="exaserve-agent", help_text="Absolute, or below the user's home."
    )
    python = forms.CharField(
        max_length=500,
        required=False,
        help_text="An interpreter that has the agent's packages; empty: find one, make an environment.",
    )
    allow_http = forms.BooleanField(
        required=False, label="The network in between is trusted", help_text="Lets keys cross it without TLS."
    )
    restart_when_dead = forms.BooleanField(
        required=False,
        label="Restart a dead agent over SSH",
        help_text="Once for each death of its node; needs the ssh-agent.",
    )
    field_order = (
        "host", "port", "user", "auth", "key_file", "passphrase", "password",
        "node_name", "address", "folder", "python", "allow_http", "restart_when_dead",
    )  # fmt: skip

    def clean(self) -> dict[str, Any]:
        """See that healing could sign in."""
        cleaned = super().clean()
        if cleaned.get("restart_when_dead") and cleaned.get("auth") != Auth.AGENT:
            self.add_error("restart_when_dead", "Choose the ssh-agent of the controllers to use this.")
        return cleaned
