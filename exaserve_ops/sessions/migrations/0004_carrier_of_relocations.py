from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("inference_sessions", "0003_relocations"),
    ]

    operations = [
        migrations.AddField(
            model_name="relocation",
            name="carrier",
            field=models.CharField(
                blank=True,
                help_text="What its KV went by: `shared_memory` of the node, or `tcp`.",
                max_length=16,
            ),
        ),
    ]
