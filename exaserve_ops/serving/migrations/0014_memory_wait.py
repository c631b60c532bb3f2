from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0013_handed_over'),
    ]

    operations = [
        migrations.AddField(
            model_name='replica',
            name='memory_wait',
            field=models.JSONField(blank=True, help_text='What memory its launch waits for, and who holds it; null: none.', null=True),
        ),
        migrations.AddField(
            model_name='replica',
            name='memory_since',
            field=models.DateTimeField(blank=True, help_text='Since when its launch waits for memory.', null=True),
        ),
    ]
