from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("serving", "0003_replica_reach"),
    ]

    operations = [
        migrations.AddField(
            model_name="model",
            name="config",
            field=models.JSONField(
                blank=True,
                default=dict,
                help_text="config.json as it was read: what memory is planned with.",
            ),
        ),
        migrations.AlterField(
            model_name="model",
            name="kv_bytes_per_token",
            field=models.BigIntegerField(
                blank=True,
                help_text="What each further token takes; null: the layout is not known.",
                null=True,
            ),
        ),
    ]
