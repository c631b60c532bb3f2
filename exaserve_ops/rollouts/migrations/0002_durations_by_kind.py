"""Durations of answers are kept by kind: what was counted before is of no known kind."""

from django.db import migrations, models

_KIND = "whole:unknown"


def sort_by_kind(apps, _schema_editor):
    answers = apps.get_model("rollouts", "ReleaseAnswers")
    for row in answers.objects.exclude(ttft={}).iterator():
        row.ttft = {_KIND: row.ttft}
        row.save(update_fields=["ttft"])


def put_together(apps, _schema_editor):
    answers = apps.get_model("rollouts", "ReleaseAnswers")
    for row in answers.objects.exclude(ttft={}).iterator():
        total = {}
        for buckets in row.ttft.values():
            for bucket, count in buckets.items():
                total[bucket] = total.get(bucket, 0) + count
        row.ttft = total
        row.save(update_fields=["ttft"])


class Migration(migrations.Migration):

    dependencies = [
        ("rollouts", "0001_initial"),
    ]

    operations = [
        migrations.AlterField(
            model_name="releaseanswers",
            name="ttft",
            field=models.JSONField(
                default=dict, help_text="By kind of answer: counts by bucket, see `domain.durations`."
            ),
        ),
        migrations.AlterField(
            model_name="releaseanswers",
            name="itl",
            field=models.JSONField(
                default=dict, help_text="Counts by bucket of streamed answers' time between tokens."
            ),
        ),
        migrations.RunPython(sort_by_kind, put_together, elidable=True),
    ]
